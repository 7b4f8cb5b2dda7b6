// What the page knows: the hub's messages put together, and the curves it collects while it is open.

const EVENTS_KEPT = 100;
const ROUNDS_KEPT = 200;
const POINTS_KEPT = 1200; // per curve; beyond that every second point is dropped
const RATE_WINDOW_S = 10;
const LEAST_RATE_SPAN_S = 2;
export const OPEN = new Set(["waiting", "running", "stopping"]);
const AT_WORK = new Set(["warming", "training", "idle"]);

export class Model {
  constructor() {
    this.hub = null;
    this.runs = new Map(); // run id -> RunInfo, oldest first
    this.outdated = new Set(); // run ids whose rounds and evaluations the stream does not bring
    this.events = []; // newest first
    this.cost = null;
    this.time = 0; // the hub's clock when the message was made
    this.receivedMs = 0;
    this.curves = new Map(); // run id -> Curves
    this.traffic = new PerMinute(); // bytes
  }

  // One message of /api/stream?news=1. The first one of a connection is whole, the others hold what is new.
  take(state, isFirst, byteCount, nowMs) {
    if (isFirst) this.#forget();
    this.hub = { ...state.hub, runs: undefined };
    for (const brief of state.hub.runs) {
      this.#merge(brief);
      this.outdated.add(brief.run_id);
    }
    for (const run of state.runs) {
      this.#merge(run);
      this.outdated.delete(run.run_id);
    }
    for (const run of this.runs.values()) this.#collect(run, state.time);
    const known = new Set(this.events.map((event) => event.id));
    const fresh = state.events.filter((event) => !known.has(event.id)).reverse();
    this.events = [...fresh, ...this.events].slice(0, EVENTS_KEPT);
    Object.assign(this, { cost: state.cost, time: state.time, receivedMs: nowMs });
    this.traffic.add(byteCount, nowMs);
  }

  // A run that the stream only mentions, fetched in full.
  takeRun(run) {
    this.runs.set(run.run_id, run);
    this.outdated.delete(run.run_id);
  }

  // The hub's clock now.
  now(nowMs) {
    return this.time + (nowMs - this.receivedMs) / 1000;
  }

  // The one to show when nobody has chosen: the latest that is open, else the latest.
  latestRun() {
    const runs = [...this.runs.values()];
    return runs.findLast((run) => OPEN.has(run.state)) ?? runs.at(-1) ?? null;
  }

  curvesOf(runId) {
    if (!this.curves.has(runId)) this.curves.set(runId, new Curves());
    return this.curves.get(runId);
  }

  #forget() {
    this.runs.clear();
    this.outdated.clear();
    this.events = [];
  }

  #merge(run) {
    const old = this.runs.get(run.run_id);
    if (!old) {
      this.runs.set(run.run_id, run);
      return;
    }
    const job = Object.keys(run.job).length ? run.job : old.job;
    const rounds = mergeBy((round) => `${round.fragment}/${round.version}`, old.rounds, run.rounds).slice(-ROUNDS_KEPT);
    const keyOf = (point) => `${point.version}/${point.node_id}/${point.time}`;
    this.runs.set(run.run_id, { ...run, job, rounds, evaluations: mergeBy(keyOf, old.evaluations, run.evaluations) });
  }

  #collect(run, time) {
    if (run.state === "running" || run.state === "stopping") this.curvesOf(run.run_id).add(run, time);
  }
}

function mergeBy(keyOf, old, added) {
  const all = new Map(old.map((item) => [keyOf(item), item]));
  for (const item of added) all.set(keyOf(item), item);
  return [...all.values()];
}

// Training loss and tokens per second of each node of a run, as they went by.
export class Curves {
  constructor() {
    this.nodes = new Map(); // node id -> {loss, rate, recent, step}
  }

  add(run, time) {
    for (const node of run.nodes) {
      const own = this.#of(node.node_id);
      const isAtWork = AT_WORK.has(node.state);
      if (!isAtWork || node.loss == null) own.loss.gap(time);
      else if (node.step !== own.step) own.loss.add(time, node.loss);
      own.step = node.step;
      if (!isAtWork) own.recent = [];
      const rate = isAtWork ? rateOf(own.recent, time, node.tokens) : null;
      if (rate == null) own.rate.gap(time);
      else own.rate.add(time, rate);
    }
  }

  // Tokens per second at the latest message; null when not known.
  rateOf(nodeId) {
    return this.nodes.get(nodeId)?.rate.last() ?? null;
  }

  #of(nodeId) {
    if (!this.nodes.has(nodeId)) {
      this.nodes.set(nodeId, { loss: new Curve(), rate: new Curve(), recent: [], step: -1 });
    }
    return this.nodes.get(nodeId);
  }
}

// `recent`: [time, tokens] of the last seconds, changed in place.
function rateOf(recent, time, tokens) {
  if (recent.length && tokens < recent.at(-1)[1]) recent.length = 0; // the hub started again and counts anew
  recent.push([time, tokens]);
  while (time - recent[0][0] > RATE_WINDOW_S && recent.length > 2) recent.shift();
  const span = time - recent[0][0];
  return span >= LEAST_RATE_SPAN_S ? (tokens - recent[0][1]) / span : null;
}

class Curve {
  constructor() {
    this.times = [];
    this.values = [];
  }

  add(time, value) {
    this.times.push(time);
    this.values.push(value);
    if (this.times.length > POINTS_KEPT) {
      const isKept = (_, index) => index % 2 === 0 || this.values[index] == null;
      [this.times, this.values] = [this.times.filter(isKept), this.values.filter(isKept)];
    }
  }

  gap(time) {
    if (this.values.length && this.values.at(-1) != null) this.add(time, null);
  }

  last() {
    return this.values.at(-1) ?? null;
  }
}

// A sum over the last minute, per second: bytes of the stream, milliseconds of drawing.
export class PerMinute {
  constructor() {
    this.recent = [];
  }

  add(amount, nowMs) {
    this.recent.push([nowMs, amount]);
    while (nowMs - this.recent[0][0] > 60000) this.recent.shift();
  }

  perS() {
    if (this.recent.length < 2) return null;
    const spanS = (this.recent.at(-1)[0] - this.recent[0][0]) / 1000;
    return this.recent.slice(1).reduce((sum, [, amount]) => sum + amount, 0) / Math.max(spanS, 0.001);
  }
}

// ---- questions about a run -----------------------------------------------------------------------------------------

// Held-out losses, one per version (nodes that evaluate the same base agree), by version.
export function heldOut(run) {
  const byVersion = new Map();
  for (const point of run?.evaluations ?? []) byVersion.set(point.version, point);
  return [...byVersion.values()].sort((a, b) => a.version - b.version);
}

// The version that every fragment has reached.
export function hubVersion(run) {
  return run?.versions.length ? Math.min(...run.versions) : 0;
}

// {compute, communication, data, other} of a node, as shares of its training time; null before it has any.
export function timeShares(node) {
  if (!(node.wall_s > 0)) return null;
  const known = { compute: node.compute_s, communication: node.communication_s, data: node.data_s };
  const spent = Object.values(known).reduce((sum, seconds) => sum + seconds, 0);
  const whole = Math.max(node.wall_s, spent);
  const shares = Object.fromEntries(Object.entries(known).map(([name, seconds]) => [name, seconds / whole]));
  return { ...shares, other: (whole - spent) / whole };
}

// Tokens per second of the latest ten rounds: what the hub merged.
export function mergedRates(run) {
  const rounds = (run?.rounds ?? []).filter((round) => round.fragment === 0).sort((a, b) => a.version - b.version);
  return rounds.slice(1).map((round, index) => {
    const last = rounds.slice(Math.max(0, index - 8), index + 2);
    const span = round.time - last[0].time;
    const tokens = last.slice(1).reduce((sum, item) => sum + item.tokens, 0);
    return { time: round.time, rate: span > 0 ? tokens / span : null };
  });
}
