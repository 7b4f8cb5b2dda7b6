// Lists and tables: findings, ledger, nodes, rounds, events, and what the monitor costs.

import { byId, fillList, fillTable, h, setAttribute, setText, setWords, show } from "./dom.js";
import { versionsBehind } from "./findings.js";
import { bytes, clock, count, duration, loss, percent, plural, rate, whole } from "./format.js";
import { mark } from "./head.js";
import { look } from "./map.js";
import { hubVersion } from "./model.js";

const LEVELS = [
  [/^(node\.dead|run\.failed|worker\.failed|storage\.|node\.evicted)/, "bad"],
  [/^(node\.suspect|push\.rejected|data\.differs|samples\.returned|run\.stopp|node\.draining|node\.restarted)/, "warn"],
  [/^(node\.(joined|back|revived)|run\.(finished|training|started|resumed)|worker\.(attached|revived))/, "ok"],
];

export function drawFindings(found) {
  const items = found.length ? found : [{ level: "ok", title: "nothing to report", next: "" }];
  const make = () => h("li", {}, h("span", { class: "mark", "aria-hidden": "true" }), h("div", {}, h("p", { class: "title" }), h("p", { class: "next" })));
  fillList(byId("findings"), items, make, (element, finding) => {
    setAttribute(element, "data-level", finding.level);
    setText(element.querySelector(".mark"), mark(finding.level));
    setWords(element.querySelector(".title"), finding.title);
    setWords(element.querySelector(".next"), finding.next ? `next: ${finding.next}` : "");
  });
}

// Each node's base beside the hub's version, as a bar and in words.
export function drawLedger(run) {
  const newest = hubVersion(run);
  const rows = !run ? [] : [{ name: "hub", version: newest, note: "newest", isHub: true }, ...run.nodes.map((node) => ledgerRow(node, run))];
  const make = () => h("li", {}, h("span", { class: "name" }), h("progress", { "aria-hidden": "true" }), h("span", { class: "version" }));
  fillList(byId("ledger"), rows, make, (element, row) => {
    const [name, bar, version] = element.children;
    setAttribute(element, "data-hub", row.isHub ? "1" : "");
    setText(name, row.name);
    bar.max = Math.max(1, newest);
    bar.value = row.version;
    setText(version, `${row.version}, ${row.note}`);
  });
  const list = byId("ledger");
  setAttribute(list, "data-empty", rows.length ? "" : "no run yet");
}

function ledgerRow(node, run) {
  const behind = versionsBehind(node, run);
  const isThere = node.state !== "gone" && node.state !== "done";
  const note = !isThere ? node.state : behind ? `${whole(behind)} behind` : "up to date";
  return { name: node.node_id, version: node.base_version, note };
}

const NODE_COLUMNS = [
  { name: "node", isHead: true },
  { name: "state" },
  { name: "last seen", isNumber: true, title: "time since its last heartbeat" },
  { name: "worker" },
  { name: "restarts", isNumber: true, title: "of its worker" },
  { name: "up", isNumber: true, title: "measured, node to hub" },
  { name: "down", isNumber: true, title: "measured, hub to node" },
  { name: "round trip", isNumber: true, title: "measured" },
  { name: "claimed link", isNumber: true, title: "what its operator says" },
  { name: "share of claim", isNumber: true, title: "measured up as a share of the claimed bandwidth" },
  { name: "GPUs of claimed", isNumber: true, title: "found of claimed" },
  { name: "memory free", isNumber: true },
  { name: "disk free", isNumber: true },
  { name: "location" },
  { name: "run" },
  { name: "machine" },
  { name: "versions" },
];

export function drawNodes(hub, sinceS) {
  fillTable(byId("table-nodes"), NODE_COLUMNS, hub.nodes.map((node) => nodeRow(node, sinceS)), "no node has joined yet");
}

function nodeRow(node, sinceS) {
  const { measured, worker, facts } = node;
  const { tone, mark: sign } = look(node.state);
  const workerText = worker.detail ? `${worker.state}: ${worker.detail}` : worker.state;
  return [
    node.node_id,
    { text: node.state, tone, mark: sign },
    node.last_seen_s == null ? "not since the hub started" : duration(node.last_seen_s + sinceS),
    { text: workerText, tone: worker.state === "failed" ? "bad" : "", mark: worker.state === "failed" ? "✕" : "" },
    { text: whole(worker.restarts), tone: worker.restarts ? "warn" : "", mark: worker.restarts ? "!" : "" },
    rate(measured.up_bits_per_s),
    rate(measured.down_bits_per_s),
    duration(measured.rtt_s),
    ...claims(node),
    bytes(measured.memory_free_bytes),
    bytes(measured.disk_free_bytes),
    node.location,
    node.run_id || "–",
    [facts.host, facts.device].filter(Boolean).join(", ") || "–",
    ["ciuic", "torch", "python"].filter((name) => facts[name]).map((name) => `${name} ${facts[name]}`).join(", ") || "–",
  ];
}

// Claimed link, what was measured of it, and GPUs found of claimed.
function claims({ claimed, measured }) {
  const link = claimed.bandwidth_gbit_s == null ? null : claimed.bandwidth_gbit_s * 1e9;
  const share = link && measured.up_bits_per_s != null ? measured.up_bits_per_s / link : null;
  const gpus = claimed.gpus ?? claimed.gpu;
  const isSilent = gpus == null && measured.gpu_count == null;
  return [rate(link), percent(share, share < 0.1 ? 1 : 0), isSilent ? "–" : `${whole(measured.gpu_count)} of ${whole(gpus)}`];
}

const MEMBER_COLUMNS = [
  { name: "node", isHead: true },
  { name: "state" },
  { name: "base", isNumber: true, title: "version of the node's base" },
  { name: "behind", isNumber: true, title: "versions behind the hub" },
  { name: "step", isNumber: true },
  { name: "samples", isNumber: true },
  { name: "tokens/s", isNumber: true, title: "over the last seconds" },
  { name: "loss", isNumber: true, title: "on its own samples" },
  { name: "step time", isNumber: true, title: "median" },
  { name: "compute", isNumber: true },
  { name: "exposed comm.", isNumber: true, title: "time in which training waited for or worked on communication" },
  { name: "data", isNumber: true },
  { name: "longest stall", isNumber: true, title: "longest time in which a step was blocked on the hub" },
  { name: "pushes merged", isNumber: true },
  { name: "rejected", isNumber: true },
  { name: "staleness", isNumber: true, title: "of its push in the latest round it was in" },
  { name: "incarnation", isNumber: true, title: "starts of its worker in this run" },
];

export function drawMembers(run, curves) {
  const rows = (run?.nodes ?? []).map((node) => {
    const share = (seconds) => (node.wall_s > 0 ? percent(seconds / node.wall_s, 1) : "–");
    return [
      node.node_id,
      { text: node.state, tone: node.state === "gone" ? "bad" : "", mark: node.state === "gone" ? "✕" : "" },
      whole(node.base_version),
      whole(versionsBehind(node, run)),
      whole(node.step),
      whole(node.samples),
      count(curves.rateOf(node.node_id)),
      loss(node.loss),
      node.step_s ? duration(node.step_s) : "–",
      share(node.compute_s),
      share(node.communication_s),
      share(node.data_s),
      duration(node.longest_stall_s),
      `${whole(node.pushes_merged)} of ${whole(node.pushes_accepted)}`,
      { text: whole(node.pushes_rejected), tone: node.pushes_rejected ? "warn" : "", mark: node.pushes_rejected ? "!" : "" },
      whole(node.staleness),
      whole(node.incarnation),
    ];
  });
  fillTable(byId("table-members"), MEMBER_COLUMNS, rows, "no node has taken this run yet");
}

const ROUND_COLUMNS = [
  { name: "version", isHead: true, isNumber: true },
  { name: "fragment", isNumber: true },
  { name: "closed at" },
  { name: "took", isNumber: true },
  { name: "why", title: "complete: all were there; deadline: it closed without the late; member-gone: somebody left; finish: the end" },
  { name: "nodes (staleness)", title: "versions that a push was behind, where it was" },
  { name: "tokens", isNumber: true },
  { name: "pushes", isNumber: true },
  { name: "entry", isNumber: true },
];

export function drawRounds(run) {
  const rounds = [...(run?.rounds ?? [])].sort((a, b) => b.version - a.version || b.fragment - a.fragment);
  const rows = rounds.map((round) => [
    whole(round.version),
    whole(round.fragment),
    clock(round.time),
    round.duration_s ? duration(round.duration_s) : "–",
    { text: round.why, tone: round.why === "complete" ? "" : "warn", mark: round.why === "complete" ? "" : "!" },
    round.nodes.map((name, index) => (round.staleness[index] ? `${name} (${round.staleness[index]} behind)` : name)).join(", "),
    whole(round.tokens),
    bytes(round.push_bytes),
    bytes(round.entry_bytes),
  ]);
  fillTable(byId("table-rounds"), ROUND_COLUMNS, rows, "no round has closed yet");
  setText(byId("rounds-summary"), roundsSummary(rounds));
}

function roundsSummary(rounds) {
  if (!rounds.length) return "";
  const timed = rounds.filter((round) => round.duration_s > 0);
  const mean = timed.reduce((sum, round) => sum + round.duration_s, 0) / Math.max(1, timed.length);
  const complete = rounds.filter((round) => round.why === "complete").length;
  const carried = rounds.filter((round) => round.staleness.some((behind) => behind > 0)).length;
  return `${plural(rounds.length, "round")} shown, ${percent(complete / rounds.length)} complete, ${duration(mean)} each on average, ${plural(carried, "round")} with a carried push`;
}

const EVENT_COLUMNS = [{ name: "time" }, { name: "kind" }, { name: "run" }, { name: "node" }, { name: "what happened" }];

// `filter`: words that must all occur, in any column.
export function drawEvents(events, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = events.map((event) => [clock(event.time), event.kind, event.run_id, event.node_id, event.text]);
  const isWanted = (row) => words.every((word) => row.join(" ").toLowerCase().includes(word));
  const wanted = rows.map((row) => ({ row, level: levelOf(row[1]) })).filter(({ row }) => isWanted(row));
  const cells = wanted.map(({ row, level }) => [row[0], { text: row[1], tone: level, mark: level ? mark(level) : "" }, ...row.slice(2)]);
  fillTable(byId("table-events"), EVENT_COLUMNS, cells, events.length ? "no event has these words" : "no event yet");
  setText(byId("event-count"), words.length ? `${wanted.length} of ${events.length}` : "");
}

function levelOf(kind) {
  return LEVELS.find(([pattern]) => pattern.test(kind))?.[1] ?? "";
}

export function drawTabCounts(counts) {
  for (const [name, number] of Object.entries(counts)) {
    const badge = byId(`tab-${name}`).querySelector("span");
    setText(badge, number == null ? "" : ` ${whole(number)}`);
    show(badge, number != null);
  }
}

// What watching costs: the hub's work for this stream, the stream, and the drawing here.
export function drawCost(cost, bytesPerS, drawMsPerS) {
  const built = cost.messages
    ? `the hub's latest message: ${bytes(cost.message_bytes)}, built in ${duration(cost.build_s)} (${duration(cost.build_cpu_s)} of processor time)`
    : "this is the hub's first message";
  const minute = bytesPerS == null ? "" : `; over the last minute ${bytes(bytesPerS)}/s, and drawing took ${percent(drawMsPerS / 1000, 1)} of this browser's time`;
  setText(byId("cost"), `the monitor's own cost: ${built}; ${plural(cost.viewers, "page")} watching${minute}`);
}
