// What is wrong now, and what to do about it: plain rules over the hub's state, worst first.

import { bytes, duration, joined, percent, plural, rate } from "./format.js";
import { hubVersion, OPEN, timeShares } from "./model.js";

const RECENT_S = 60;
const LOW_DISK_BYTES = 1e9;
const FULL_DISK_BYTES = 1e8;
const CLOCK_OFF_S = 2;
const WAITING_SHARE = 0.25; // exposed communication beyond this is worth a word
const ENOUGH_TIME_S = 20;
const SLOW_SHARE = 0.5;
const QUIET_ROUNDS = 10; // times the usual duration
const QUIET_LEAST_S = 30;
const LATE_ROUNDS = 20;
const LATE_LEAST = 10;
const LATE_SHARE = 0.3;
const FAR_BELOW_CLAIM = 0.5;
const NAMED = 3;
const GONE = new Set(["left", "evicted"]);
const RANK = { bad: 0, warn: 1, info: 2 };

// view: {hub, run (or null), events (newest first), now (the hub's clock), sinceS (age of the message), rateOf(node id)}
// Returns [{level: "bad" | "warn" | "info", title, next}]; `commands` stand between backticks.
export function findings(view) {
  const rules = [ofRun, ofDoctor, ofLoss, ofStorage, ofNodes, ofPushes, ofRounds, ofPace, ofClaims];
  const found = rules.flatMap((rule) => rule(view));
  return found.sort((a, b) => RANK[a.level] - RANK[b.level]);
}

// The first thing to read: the worst finding, or that all is well.
export function verdict(view, found) {
  const wrong = found.filter((finding) => finding.level !== "info");
  if (wrong.length) {
    const more = wrong.length > 1 ? ` (and ${wrong.length - 1} more below)` : "";
    return { level: wrong[0].level, title: wrong[0].title + more, next: wrong[0].next };
  }
  return { level: "ok", title: `all well: ${story(view)}`, next: "" };
}

function story({ hub, run }) {
  if (!hub.nodes.length) return "the hub runs, no node has joined yet; make a token with `ciuic hub token create`";
  if (!run) return `${plural(hub.nodes.length, "node")}, no run yet; submit one with \`ciuic run job.toml\``;
  const agreement = run.loss_consistent ? "; all nodes agree on the final base and its loss" : "";
  if (run.state === "finished") return `${run.run_id} has finished${agreement}`;
  if (run.state === "stopped") return `${run.run_id} was stopped; \`ciuic resume ${run.run_id}\` goes on`;
  const atWork = run.nodes.filter((node) => ["training", "idle"].includes(node.state)).length;
  const starting = hub.nodes.filter((node) => node.state === "assigned" && node.run_id === run.run_id).map((node) => node.node_id);
  if (atWork) return `${plural(atWork, "node trains", "nodes train")} ${run.run_id}${starting.length ? `, ${joined(starting)} starting` : ""}`;
  return `the workers of ${run.run_id} are starting`;
}

// ---- rules ---------------------------------------------------------------------------------------------------------

function ofRun({ run }) {
  if (run?.state === "failed") {
    return [bad(`${run.run_id} failed: ${run.reason || "no reason was recorded"}`, `\`ciuic logs ${run.run_id}\`, then \`ciuic resume ${run.run_id}\``)];
  }
  if (run?.state === "waiting") {
    return [warn(`${run.run_id} waits${run.reason ? `: ${run.reason}` : " for nodes"}`, "join more nodes (`ciuic hub token create`, then `ciuic node join`), or lower [nodes] min")];
  }
  return [];
}

// What the doctor's rules have found in the hub; samples that count twice are told below in any case.
function ofDoctor({ run }) {
  const levels = { critical: bad, warning: warn, note: info };
  return (run?.findings ?? [])
    .filter((finding) => finding.code !== "CIUIC-M5")
    .map((finding) => (levels[finding.severity] ?? info)(`${finding.code}: ${finding.cause}`, finding.fix));
}

function ofLoss({ run }) {
  if (!run) return [];
  const found = [];
  const { duplicated, lost } = run.samples;
  if (run.evaluations?.some((point) => point.loss == null)) {
    found.push(bad("the held-out loss is not a number any more", "stop the run; lower [optim] lr or raise warmup, then start again"));
  }
  if (run.loss_consistent === false) {
    found.push(bad("the nodes do not agree on the final loss or base", "compare torch versions and data in the Nodes view; keep the run's folder and report this"));
  }
  if (duplicated || lost) {
    found.push(bad(`${plural(duplicated, "sample")} counted twice, ${lost} lost`, "keep the run's folder and report this: neither may happen"));
  }
  return found;
}

function ofStorage({ hub, run, events, now }) {
  const found = [];
  const failed = events.find((event) => event.kind === "storage.failed");
  const wroteAfter = failed && events.some((event) => event.kind === "round.closed" && event.id > failed.id);
  if (failed && !wroteAfter && (now - failed.time < RECENT_S || run?.state === "running")) {
    found.push(bad(`the hub cannot write: ${failed.text}`, "free space on the hub's disk; rounds go on by themselves"));
  }
  const free = hub.disk_free_bytes;
  if (free < LOW_DISK_BYTES) {
    const level = free < FULL_DISK_BYTES ? bad : warn;
    found.push(level(`the hub's disk has ${bytes(free)} left`, "free space there before rounds stop"));
  }
  return found;
}

function ofNodes({ hub, run, sinceS }) {
  const members = new Set((run?.nodes ?? []).filter((node) => node.state !== "done").map((node) => node.node_id));
  const isOpen = run != null && OPEN.has(run.state);
  return hub.nodes.flatMap((node) => {
    const isMember = isOpen && (members.has(node.node_id) || node.run_id === run.run_id);
    return [...ofPresence(node, { hub, isMember, sinceS }), ...ofWorker(node, run)];
  });
}

function ofPresence(node, { hub, isMember, sinceS }) {
  const silence = node.last_seen_s == null ? "" : ` for ${duration(node.last_seen_s + sinceS)}`;
  const name = node.node_id;
  const others = isMember ? "; the others train on without it" : "";
  if (node.state === "dead") {
    const level = isMember ? bad : node.last_seen_s == null ? info : warn;
    const title = silence ? `${name} is dead: not heard${silence}${others}` : `${name} is dead: not heard since the hub started`;
    return [level(title, `on that machine: \`ciuic node join ${hub.url} --location ${node.location}\``)];
  }
  if (node.state === "suspect") {
    return [warn(`${name} is silent${silence}`, "nothing yet: it is dead only after its grace; if it happens often, look at its link")];
  }
  if (node.state === "draining") return [info(`${name} is draining: it takes no new work`, "nothing: it leaves by itself")];
  const offset = Math.abs(node.measured.clock_offset_s ?? 0);
  return offset > CLOCK_OFF_S
    ? [info(`the clock of ${name} is off by ${duration(offset)}`, "switch on time synchronisation there; training does not depend on it, log times do")]
    : [];
}

function ofWorker(node, run) {
  const worker = node.worker;
  if (!run || worker.run_id !== run.run_id) return [];
  const logs = `\`ciuic logs ${run.run_id} --node ${node.node_id}\``;
  if (worker.state === "failed") {
    const detail = worker.detail || (worker.exit_code == null ? "" : `exit code ${worker.exit_code}`);
    return [bad(`the worker on ${node.node_id} failed${detail ? `: ${detail}` : ""}`, logs)];
  }
  if (!worker.restarts) return [];
  return [info(`the worker on ${node.node_id} was restarted ${plural(worker.restarts, "time")}`, logs)];
}

function ofPushes({ run, events, now }) {
  const mine = events.filter((event) => !run || event.run_id === run.run_id);
  const rejected = mine.filter((event) => event.kind === "push.rejected" && now - event.time < RECENT_S);
  const found = [];
  if (rejected.length) {
    const next = "stale: raise [sync] interval or max_staleness; otherwise look at that node's data and versions";
    found.push(warn(`${plural(rejected.length, "push was", "pushes were")} rejected in the last minute: ${rejected[0].text}`, next));
  }
  const differs = mine.find((event) => event.kind === "data.differs");
  if (differs) found.push(warn(differs.text, "give all nodes the same files in the same order"));
  return found;
}

function ofRounds({ run, events, now }) {
  if (run?.state !== "running" || !run.rounds?.length) return [];
  const latest = run.rounds.slice(-LATE_ROUNDS);
  const usual = median(latest.map((round) => round.duration_s).filter((seconds) => seconds > 0));
  const quiet = now - latest.at(-1).time;
  if (usual && quiet > Math.max(QUIET_LEAST_S, QUIET_ROUNDS * usual)) {
    const next = `\`ciuic logs ${run.run_id} -f\` shows what the nodes do`;
    return [warn(`no round has closed for ${duration(quiet)}; usually it takes ${duration(usual)}`, next)];
  }
  const training = run.nodes.filter((node) => node.state === "training").map((node) => node.node_id);
  return training.flatMap((name) => ofLateness(name, latest.filter((round) => round.time > attachedAt(name, run, events))));
}

function ofLateness(name, rounds) {
  const missed = rounds.filter((round) => !round.nodes.includes(name)).length / rounds.length;
  if (rounds.length < LATE_LEAST || missed <= LATE_SHARE) return [];
  return [info(`${name} is not in ${percent(missed)} of the latest ${rounds.length} rounds`, "its pushes are carried to the next round; a larger [sync] interval or deadline takes it along")];
}

// When its present worker took its place; long ago when no event of the latest tells.
function attachedAt(name, run, events) {
  const attached = events.find((event) => event.kind === "worker.attached" && event.node_id === name && event.run_id === run.run_id);
  return attached?.time ?? 0;
}

function ofPace({ run, rateOf }) {
  if (run?.state !== "running") return [];
  const atWork = run.nodes.filter((node) => node.state === "training" && node.wall_s > ENOUGH_TIME_S);
  const waiting = atWork
    .filter((node) => timeShares(node).communication > WAITING_SHARE)
    .map((node) => info(`${node.node_id} spends ${percent(timeShares(node).communication)} of its time on communication`, "raise [sync] interval, or choose a smaller [sync] compression"));
  const rates = atWork.map((node) => [node.node_id, rateOf(node.node_id)]).filter(([, value]) => value > 0);
  rates.sort((a, b) => a[1] - b[1]);
  if (rates.length < 2 || rates[0][1] >= SLOW_SHARE * rates.at(-1)[1]) return waiting;
  const title = `${rates[0][0]} is at ${percent(rates[0][1] / rates.at(-1)[1])} of the speed of ${rates.at(-1)[0]}`;
  return [...waiting, info(title, "samples are shared out by speed, so nothing is lost; see whether something else uses that machine")];
}

function ofClaims({ hub }) {
  const below = hub.nodes.filter((node) => {
    const claimed = (node.claimed.bandwidth_gbit_s ?? 0) * 1e9;
    return !GONE.has(node.state) && claimed > 0 && node.measured.up_bits_per_s < FAR_BELOW_CLAIM * claimed;
  });
  if (!below.length) return [];
  const parts = below.slice(0, NAMED).map((node) => `${node.node_id} ${rate(node.measured.up_bits_per_s)} of ${rate(node.claimed.bandwidth_gbit_s * 1e9)}`);
  if (below.length > NAMED) parts.push(`${below.length - NAMED} more`);
  return [info(`measured links are far below their claims: ${joined(parts)}`, "plan with what was measured")];
}

// ---- helpers -------------------------------------------------------------------------------------------------------

const bad = (title, next) => ({ level: "bad", title, next });
const warn = (title, next) => ({ level: "warn", title, next });
const info = (title, next) => ({ level: "info", title, next });

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// How far a node's base is behind the hub's version.
export function versionsBehind(node, run) {
  return Math.max(0, hubVersion(run) - node.base_version);
}
