// Tabs by the ARIA pattern: arrow keys, Home and End move; the address keeps the choice (#nodes).

export class Tabs {
  constructor(list, onChange) {
    this.tabs = [...list.querySelectorAll('[role="tab"]')];
    this.onChange = onChange;
    list.addEventListener("click", (event) => this.#onClick(event));
    list.addEventListener("keydown", (event) => this.#onKey(event));
    addEventListener("hashchange", () => this.#select(this.#fromAddress()));
    this.#select(this.#fromAddress());
  }

  get current() {
    return this.selected.getAttribute("aria-controls");
  }

  #fromAddress() {
    const name = location.hash.slice(1);
    return this.tabs.find((tab) => tab.getAttribute("aria-controls") === name) ?? this.tabs[0];
  }

  #select(chosen) {
    this.selected = chosen;
    for (const tab of this.tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
    this.onChange();
  }

  #go(tab) {
    history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
    this.#select(tab);
  }

  #onClick(event) {
    const tab = event.target.closest('[role="tab"]');
    if (tab) this.#go(tab);
  }

  #onKey(event) {
    const last = this.tabs.length - 1;
    const place = this.tabs.indexOf(this.selected);
    const places = { ArrowRight: place === last ? 0 : place + 1, ArrowLeft: place === 0 ? last : place - 1, Home: 0, End: last };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.#go(this.tabs[places[event.key]]);
    this.selected.focus();
  }
}
