// Making and changing elements. Text only ever goes in as text: names and log lines come from other machines.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

// h("p", {class: "muted"}, "text", otherElement)
export function h(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

function furnish(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

// Only touches the page when something differs: selections stay, screen readers stay calm.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The same, with what stands between backticks as code.
export function setWords(element, text) {
  const plain = text.replaceAll("`", "");
  if (element.textContent === plain) return;
  element.replaceChildren(...text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part)));
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function show(element, isShown) {
  if (element.hidden === isShown) element.hidden = !isShown;
}

// A cell is a text or {text, title, tone, mark}; `mark` is a sign before the text, so that colour is never alone.
export function fillTable(table, columns, rows, empty) {
  const header = JSON.stringify(columns.map((column) => column.name));
  if (table.dataset.header !== header) {
    table.dataset.header = header;
    const cells = columns.map((column) => h("th", { scope: "col", class: kind(column), title: column.title }, column.name));
    table.replaceChildren(h("thead", {}, h("tr", {}, ...cells)), h("tbody"));
  }
  const body = table.tBodies[0];
  if (!rows.length) {
    const isThere = body.rows.length === 1 && body.rows[0].dataset.empty === empty;
    if (!isThere) {
      body.replaceChildren(h("tr", { "data-empty": empty }, h("td", { colspan: columns.length, class: "muted" }, empty)));
    }
    return;
  }
  if (body.rows[0]?.dataset.empty !== undefined) body.replaceChildren();
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  rows.forEach((cells, index) => fillRow(body.rows[index] ?? body.appendChild(h("tr")), columns, cells));
}

function fillRow(row, columns, cells) {
  columns.forEach((column, index) => {
    const tag = column.isHead ? "th" : "td";
    const cell = row.cells[index] ?? row.appendChild(h(tag, { class: kind(column), scope: column.isHead ? "row" : null }));
    const { text, title = "", tone = "", mark = "" } = typeof cells[index] === "object" ? cells[index] : { text: cells[index] };
    setText(cell, mark ? `${mark} ${text}` : text);
    setAttribute(cell, "title", title);
    setAttribute(cell, "data-tone", tone);
  });
}

function kind(column) {
  return column.isNumber ? "number" : "";
}

// Keeps a list's items by place: {text parts} are written by `write(item, element)`.
export function fillList(list, items, make, write) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  items.forEach((item, index) => write(list.children[index] ?? list.appendChild(make()), item));
}
