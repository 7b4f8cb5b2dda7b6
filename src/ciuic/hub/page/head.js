// The top of the page: connection, run choice, verdict, and the run's numbers.

import { byId, fillList, h, setAttribute, setText, setWords, show } from "./dom.js";
import { bytes, count, duration, loss, percent, whole } from "./format.js";
import { heldOut, OPEN } from "./model.js";

const MARKS = { ok: "✓", warn: "!", bad: "✕", wait: "…", info: "i" };

export function mark(level) {
  return MARKS[level] ?? "·";
}

// status: of stream.Connection; ageS: seconds since the last data, null before the first.
export function drawConnection(status, ageS) {
  const pulse = byId("pulse");
  const isLost = !status.isConnected && (status.everConnected || status.reason !== "");
  setAttribute(pulse, "data-state", status.isConnected ? "live" : isLost ? "lost" : "waiting");
  setText(pulse, status.isConnected ? `live, data ${age(ageS)} old` : isLost ? "connection lost" : "connecting");
  const banner = byId("banner");
  show(banner, isLost);
  if (!isLost) return;
  const data = ageS == null ? "no data yet" : `last data ${age(ageS)} old`;
  const why = status.reason ? ` (${status.reason})` : "";
  setText(banner, `connection lost, ${data}; what you see below is from then. Trying again${why}`);
}

function age(seconds) {
  return seconds < 1 ? "under 1 s" : seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds);
}

export function drawVerdict({ level, title, next }) {
  const element = byId("verdict");
  setAttribute(element, "data-level", level);
  setText(element.querySelector(".mark"), mark(level));
  setWords(element.querySelector(".title"), title);
  setWords(element.querySelector(".next"), next ? `next: ${next}` : "");
}

export function drawHub(hub, now) {
  setText(byId("hub"), hub ? `hub ${hub.url} · version ${hub.version} · up for ${duration(now - hub.started_at)}` : "");
}

// The choice is there when there is one.
export function drawRunChoice(runs, chosen) {
  const select = byId("run-select");
  show(byId("run-choice"), runs.length > 1);
  const newestFirst = [...runs].reverse();
  if (document.activeElement === select && select.options.length === newestFirst.length) return; // it may be open
  fillList(select, newestFirst, () => h("option"), (option, run) => {
    setAttribute(option, "value", run.run_id);
    setText(option, `${run.run_id} (${run.state}, ${percent(run.progress)})`);
  });
  if (chosen && select.value !== chosen.run_id) select.value = chosen.run_id;
}

export function drawRun(run, now, tokensPerS) {
  show(byId("run"), run != null);
  if (!run) return;
  setText(byId("run-title"), run.name);
  const state = byId("run-state");
  setText(state, run.state);
  setAttribute(state, "data-state", run.state);
  setText(byId("run-note"), note(run, now));
  byId("run-progress").value = run.progress;
  setText(byId("run-percent"), percent(run.progress));
  fillList(byId("run-facts"), facts(run, tokensPerS), () => h("div", {}, h("dt"), h("dd")), (element, fact) => {
    setText(element.firstElementChild, fact.name);
    setText(element.lastElementChild, fact.value);
    setAttribute(element, "title", fact.title ?? "");
    setAttribute(element, "data-tone", fact.tone ?? "");
  });
}

function note(run, now) {
  const parts = [run.run_id];
  if (run.parameters) parts.push(`${count(run.parameters)} parameters`);
  if (run.started_at != null) {
    const spent = (run.ended_at ?? now) - run.started_at;
    parts.push(run.ended_at ? `took ${duration(spent)}` : `running for ${duration(spent)}`);
    if (run.state === "running" && run.progress > 0.02 && run.progress < 1) {
      parts.push(`about ${duration((spent / run.progress) * (1 - run.progress))} left`);
    }
  }
  if (run.reason && OPEN.has(run.state)) parts.push(run.reason);
  return parts.join(" · ");
}

function facts(run, tokensPerS) {
  const { total, leased, committed, duplicated, lost } = run.samples;
  const points = heldOut(run);
  const [first, last] = [points[0], points.at(-1)];
  const heldOutText = points.length > 1 ? `${loss(first.loss)} → ${loss(last.loss)}` : loss(first?.loss);
  return [
    { name: "version", value: run.versions.map(whole).join(" / ") || "–", title: "of the base, per fragment: closed rounds" },
    { name: "held-out loss", value: heldOutText, title: "of the base on data that nobody trains on: first and latest" },
    { name: "samples committed", value: `${whole(committed)} of ${whole(total)}`, title: "merged into the base" },
    { name: "samples leased", value: whole(leased), title: "ever handed to a node" },
    { name: "duplicated", value: whole(duplicated), tone: duplicated ? "bad" : "ok", title: "samples merged twice; none ever should be" },
    ...(OPEN.has(run.state) ? [] : [{ name: "lost", value: whole(lost), tone: lost ? "bad" : "ok", title: "of a finished run: samples never merged" }]),
    { name: "speed", value: tokensPerS == null ? "–" : `${count(tokensPerS)} tokens/s`, title: "all nodes together, over the last seconds" },
    { name: "pushed", value: bytes(run.push_bytes), title: "updates from nodes to the hub, as merged" },
    { name: "entries", value: bytes(run.entry_bytes), title: "merged updates in the ledger; every node downloads them" },
  ];
}
