// The connection to the hub's event stream: it always tries again, and says honestly how old the data is.

const SILENCE_MS = 12000; // the hub says something every 5 s at least
const LONGEST_WAIT_MS = 5000;

export class Connection {
  // onState(state, isFirst, byteCount); onStatus(status) whenever `status` changes.
  constructor(path, { onState, onStatus }) {
    this.path = path;
    this.onState = onState;
    this.onStatus = onStatus;
    this.status = { isConnected: false, everConnected: false, lastDataMs: null, reason: "" };
    this.failures = 0;
    setInterval(() => this.#watch(), 1000);
    this.#open();
  }

  // Seconds since anything came from the hub; null before the first message.
  ageS() {
    return this.status.lastDataMs == null ? null : (performance.now() - this.status.lastDataMs) / 1000;
  }

  #open() {
    let isFirst = true;
    this.openedMs = performance.now();
    this.source = new EventSource(this.path);
    this.source.onmessage = (message) => {
      this.#heard();
      this.onState(JSON.parse(message.data), isFirst, message.data.length);
      isFirst = false;
    };
    this.source.addEventListener("alive", () => this.#heard());
    this.source.onerror = () => this.#lost("");
  }

  #heard() {
    this.failures = 0;
    this.status.lastDataMs = performance.now();
    if (!this.status.isConnected) this.#tell({ isConnected: true, everConnected: true, reason: "" });
  }

  #watch() {
    if (!this.source) return;
    const heardMs = Math.max(this.openedMs, this.status.lastDataMs ?? 0);
    if (performance.now() - heardMs > SILENCE_MS) this.#lost("the hub is silent");
  }

  async #lost(reason) {
    if (!this.source) return;
    this.source.close();
    this.source = null;
    this.failures += 1;
    this.#tell({ isConnected: false, reason });
    const waitMs = Math.min(LONGEST_WAIT_MS, 500 * 2 ** (this.failures - 1)) * (0.75 + Math.random() / 4);
    setTimeout(() => this.#open(), waitMs);
    const why = await reasonOfSilence();
    if (!this.status.isConnected && why) this.#tell({ reason: why });
  }

  #tell(change) {
    Object.assign(this.status, change);
    this.onStatus(this.status);
  }
}

// What stands in the way: the proxy on this machine, or the hub behind it; "" when nothing does any more.
async function reasonOfSilence() {
  let answer;
  try {
    answer = await fetch("/v1/hub", { cache: "no-store", signal: AbortSignal.timeout(8000) });
  } catch (problem) {
    if (problem instanceof DOMException && problem.name === "TimeoutError") return "the hub does not answer";
    return "the proxy on this machine does not answer; start it again with: ciuic dash";
  }
  if (answer.ok) return "";
  try {
    const { error } = await answer.json();
    return [error.message, error.cause].filter(Boolean).join(": ");
  } catch {
    return `the hub's answer cannot be understood: HTTP status ${answer.status}`;
  }
}
