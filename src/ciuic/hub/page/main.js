// Puts the page together: the stream fills the model, and one drawing per frame shows it.

import { drawBars } from "./bars.js";
import { Chart, heldOutChart, loadCharts, throughputChart, timeCaption, trainingChart } from "./charts.js";
import { byId, setText } from "./dom.js";
import { findings, verdict } from "./findings.js";
import { drawConnection, drawHub, drawRun, drawRunChoice, drawVerdict } from "./head.js";
import { drawMap, LEGEND } from "./map.js";
import { Model, OPEN, PerMinute } from "./model.js";
import { Connection } from "./stream.js";
import { drawCost, drawEvents, drawFindings, drawLedger, drawMembers, drawNodes, drawRounds, drawTabCounts } from "./tables.js";
import { Tabs } from "./tabs.js";

const REFETCH_MS = 2000;

let chosenRunId = "";
let isScheduled = false;
let fetchedMs = -REFETCH_MS;

const model = new Model();
const drawing = new PerMinute(); // milliseconds spent on it
const charts = [
  new Chart("chart-training", trainingChart),
  new Chart("chart-heldout", heldOutChart),
  new Chart("chart-throughput", throughputChart),
];
const tabs = new Tabs(byId("tabs"), schedule);

const connection = new Connection("/api/stream?news=1", {
  onState: (state, isFirst, byteCount) => {
    model.take(state, isFirst, byteCount, performance.now());
    schedule();
  },
  onStatus: schedule,
});

setText(byId("map-legend"), LEGEND);
byId("run-select").addEventListener("change", (event) => choose(event.target.value));
byId("event-filter").addEventListener("input", schedule);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
new ResizeObserver(schedule).observe(document.body);
setInterval(schedule, 1000); // ages grow although nothing comes
loadCharts().then((isThere) => {
  if (!isThere) charts.forEach((chart) => chart.fail("the chart library could not be loaded; the tables have the numbers"));
  schedule();
});

// Drawing waits for a frame: a page in the background costs nothing.
function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    const beganMs = performance.now();
    draw(beganMs);
    drawing.add(performance.now() - beganMs, beganMs);
  });
}

function choose(runId) {
  chosenRunId = runId;
  fetchedMs = -REFETCH_MS;
  schedule();
}

function draw(nowMs) {
  drawConnection(connection.status, connection.ageS());
  if (!model.hub) return;
  const nodeOrder = model.hub.nodes.map((node) => node.node_id);
  const run = inOrder(model.runs.get(chosenRunId) ?? model.latestRun(), nodeOrder);
  const sinceS = (nowMs - model.receivedMs) / 1000;
  const now = model.now(nowMs);
  const curves = model.curvesOf(run?.run_id ?? "");
  const rateOf = (nodeId) => (run && OPEN.has(run.state) ? curves.rateOf(nodeId) : null);
  if (run) fetchIfOutdated(run, nowMs);
  drawHub(model.hub, now);
  drawRunChoice([...model.runs.values()], run);
  drawRun(run, now, sumOfRates(run, rateOf));
  const found = findings({ hub: model.hub, run, events: model.events, now, sinceS, rateOf });
  drawVerdict(verdict({ hub: model.hub, run }, found));
  document.title = `${run ? `${Math.round(run.progress * 100)} % ${run.name} · ` : ""}ciuic`;
  drawTabCounts({ nodes: model.hub.nodes.length, rounds: run?.rounds.length ?? null, events: model.events.length });
  drawView(tabs.current, { run, curves, rateOf, found, sinceS, nodeOrder, nowMs });
  drawCost(model.cost, model.traffic.perS(), drawing.perS());
}

// Only the view that is open.
function drawView(name, { run, curves, rateOf, found, sinceS, nodeOrder, nowMs }) {
  if (name === "overview") {
    const nodes = model.hub.nodes.map((node) => ({ ...node, tokensPerS: rateOf(node.node_id), note: baseNote(node, run) }));
    drawMap(byId("map"), nodes, run?.versions.length ? `version ${Math.min(...run.versions)}` : "");
    drawFindings(found);
    drawLedger(run);
    charts.forEach((chart) => chart.draw({ run, curves, nodeOrder, time: model.time }, nowMs));
    drawBars(byId("time"), run?.nodes ?? []);
    setText(byId("time-caption"), timeCaption(run));
  } else if (name === "nodes") {
    drawNodes(model.hub, sinceS);
    drawMembers(run, { rateOf });
  } else if (name === "rounds") {
    drawRounds(run);
  } else {
    drawEvents(model.events, byId("event-filter").value);
  }
}

// The run with its nodes in the order in which they joined, everywhere the same.
function inOrder(run, nodeOrder) {
  return run && { ...run, nodes: [...run.nodes].sort((a, b) => nodeOrder.indexOf(a.node_id) - nodeOrder.indexOf(b.node_id)) };
}

function baseNote(node, run) {
  const member = run?.nodes.find((other) => other.node_id === node.node_id);
  return member && OPEN.has(run.state) ? `base ${member.base_version}` : "";
}

function sumOfRates(run, rateOf) {
  const rates = (run?.nodes ?? []).map((node) => rateOf(node.node_id)).filter((value) => value != null);
  return rates.length ? rates.reduce((sum, value) => sum + value, 0) : null;
}

// The stream brings the latest runs in full; an older one is fetched when somebody looks at it.
async function fetchIfOutdated(run, nowMs) {
  if (!model.outdated.has(run.run_id) || nowMs - fetchedMs < REFETCH_MS) return;
  fetchedMs = nowMs;
  try {
    const answer = await fetch(`/v1/runs/${encodeURIComponent(run.run_id)}`, { cache: "no-store" });
    if (answer.ok) model.takeRun(await answer.json());
    schedule();
  } catch (problem) {
    console.warn(`run ${run.run_id} could not be fetched; trying again`, problem);
  }
}
