// Charts by plotly's own file, as the installed plotly package ships it. Without it the page works; tables have the numbers.

import { heldOut, mergedRates, OPEN, timeShares } from "./model.js";
import { count, duration, loss, percent } from "./format.js";
import { setText } from "./dom.js";

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const COLOURS = 8;
const HEIGHT = 250;
const PAUSE_MS = 2000; // a chart is drawn again at most so often: drawing is what this page costs most
let plotly = null;

// Starts loading the library; resolves to whether it is there.
export function loadCharts() {
  return new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "/assets/plotly.min.js";
    const allowStyles = refuseStyles();
    const finish = () => {
      allowStyles();
      plotly = window.Plotly ?? null;
      resolve(plotly != null);
    };
    script.onload = finish;
    script.onerror = finish;
    document.head.append(script);
  });
}

// On loading, plotly adds the style of its geographic maps, which this page has none of and its policy forbids.
function refuseStyles() {
  document.head.appendChild = (node) => (node instanceof HTMLStyleElement ? node : Node.prototype.appendChild.call(document.head, node));
  return () => delete document.head.appendChild;
}

// One chart: its element, and `make(view)`, which gives {key, traces, layout, caption, empty}. The key changes with the data.
export class Chart {
  constructor(id, make) {
    this.element = document.getElementById(id);
    this.caption = this.element.parentElement.querySelector("figcaption");
    this.make = make;
    this.looks = "";
    this.key = "";
    this.drawnMs = 0;
  }

  // view: {run, curves, nodeOrder, time}. Only what is on screen and has changed is drawn.
  draw(view, nowMs) {
    const { key, traces, layout, caption, empty } = this.make(view);
    setText(this.caption, caption);
    const theme = themeNow();
    const looks = JSON.stringify([view.run?.run_id, this.element.clientWidth, theme.ink]);
    if (!plotly || !this.element.clientWidth || !this.#isDue(looks, JSON.stringify(key), nowMs)) return;
    const full = { ...baseLayout(theme), ...layout, width: this.element.clientWidth, height: HEIGHT };
    for (const axis of ["xaxis", "yaxis"]) {
      const base = baseAxis(theme);
      full[axis] = { ...base, ...layout[axis], title: { ...base.title, ...layout[axis]?.title }, visible: traces.length > 0 };
    }
    full.annotations = traces.length ? [] : [{ text: empty, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: theme.muted } }];
    plotly.react(this.element, traces, full, { displayModeBar: false, doubleClick: false });
  }

  // At once when it must look different, after a while when only the data has changed.
  #isDue(looks, key, nowMs) {
    const isDue = looks !== this.looks || (key !== this.key && nowMs - this.drawnMs >= PAUSE_MS);
    if (isDue) Object.assign(this, { looks, key, drawnMs: nowMs });
    return isDue;
  }

  fail(text) {
    this.element.replaceChildren(document.createTextNode(text));
  }
}

// ---- what the charts show ------------------------------------------------------------------------------------------

export function trainingChart({ run, curves, nodeOrder, time }) {
  const scale = timeScale(run, [...curves.nodes.values()].flatMap((own) => own.loss.times.slice(-1)));
  const traces = inOrder(curves, nodeOrder).filter(([, own]) => own.loss.times.length).map(([name, own]) => ({
    ...lineOf(name, nodeOrder), x: own.loss.times.map(scale.of), y: own.loss.values, hovertemplate: "%{y:.3f}",
  }));
  const latest = (run?.nodes ?? []).filter((node) => node.loss != null && node.state !== "gone").map((node) => `${node.node_id} ${loss(node.loss)}`);
  return {
    key: isOpen(run) ? time : run?.state,
    traces,
    layout: { xaxis: { title: { text: scale.title } }, yaxis: { tickformat: ".2~f" } },
    caption: latest.length ? `${isOpen(run) ? "now" : "at the end"}: ${latest.join(", ")}` : "no node has reported a loss yet",
    empty: "no loss reported since this page was opened",
  };
}

export function heldOutChart({ run }) {
  const points = heldOut(run);
  const theme = themeNow();
  const trace = {
    name: "held-out", mode: "lines+markers", x: points.map((point) => point.version), y: points.map((point) => point.loss),
    line: { color: theme.accent, width: 2.5 }, marker: { color: theme.accent, size: 8 },
    customdata: points.map((point) => plain(point.node_id)), hovertemplate: "%{y:.4f} (by %{customdata})",
  };
  const [first, last] = [points[0], points.at(-1)];
  const caption = points.length < 2 ? (first ? `${loss(first.loss)} at version ${first.version}` : "no evaluation yet")
    : `${loss(first.loss)} at version ${first.version}, ${loss(last.loss)} at version ${last.version}`;
  return {
    key: [points.length, last?.loss],
    traces: points.length ? [trace] : [],
    layout: { xaxis: { title: { text: "version" }, tickformat: "d" }, yaxis: { tickformat: ".2~f" }, showlegend: false },
    caption,
    empty: "no evaluation yet",
  };
}

export function throughputChart({ run, curves, nodeOrder, time }) {
  const theme = themeNow();
  const merged = mergedRates(run);
  const scale = timeScale(run, [...[...curves.nodes.values()].flatMap((own) => own.rate.times.slice(-1)), ...merged.slice(-1).map((point) => point.time)]);
  const traces = inOrder(curves, nodeOrder).filter(([, own]) => own.rate.times.length).map(([name, own]) => ({
    ...lineOf(name, nodeOrder), x: own.rate.times.map(scale.of), y: own.rate.values, hovertemplate: "%{y:.3s}",
  }));
  if (merged.length) {
    traces.push({
      name: "all, as merged", mode: "lines", x: merged.map((point) => scale.of(point.time)), y: merged.map((point) => point.rate),
      line: { color: theme.muted, width: 3 }, opacity: 0.7, hovertemplate: "%{y:.3s}",
    });
  }
  return {
    key: isOpen(run) ? time : run?.state,
    traces,
    layout: { xaxis: { title: { text: scale.title } }, yaxis: { rangemode: "tozero", tickformat: "~s" } },
    caption: speedInWords(run, inOrder(curves, nodeOrder).map(([name]) => [name, curves.rateOf(name)])),
    empty: "nothing has been trained yet",
  };
}

function speedInWords(run, rates) {
  if (run?.ended_at && run.started_at) {
    const tokens = run.nodes.reduce((sum, node) => sum + node.tokens, 0);
    return `${count(tokens / (run.ended_at - run.started_at))} tokens/s from start to end`;
  }
  const known = rates.filter(([, value]) => value != null);
  const sum = known.reduce((total, [, value]) => total + value, 0);
  return known.length ? `now: ${count(sum)} tokens/s in all; ${known.map(([name, value]) => `${name} ${count(value)}`).join(", ")}` : "no node's speed is known now";
}

// In words, under the bars.
export function timeCaption(run) {
  const nodes = (run?.nodes ?? []).filter((node) => timeShares(node));
  const waiting = nodes.map((node) => `${node.node_id} ${percent(timeShares(node).communication, 1)}`);
  const longest = nodes.reduce((most, node) => Math.max(most, node.longest_stall_s), 0);
  return waiting.length ? `exposed communication: ${waiting.join(", ")}; longest stall ${duration(longest)}` : "no node has trained yet";
}

// ---- looks ---------------------------------------------------------------------------------------------------------

function isOpen(run) {
  return run != null && OPEN.has(run.state);
}

function inOrder(curves, nodeOrder) {
  return [...curves.nodes].sort(([a], [b]) => nodeOrder.indexOf(a) - nodeOrder.indexOf(b));
}

function lineOf(name, nodeOrder) {
  const place = Math.max(0, nodeOrder.indexOf(name));
  const colour = themeNow().nodes[place % COLOURS];
  return {
    name: plain(name), mode: "lines", connectgaps: false,
    line: { color: colour, width: 1.8, dash: DASHES[place % DASHES.length] }, marker: { symbol: SYMBOLS[place % SYMBOLS.length] },
  };
}

// plotly reads a little HTML in its texts; names must stay names.
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Time since the run's start, in a unit that suits how long it is.
function timeScale(run, ends) {
  const start = run?.started_at ?? 0;
  const span = Math.max(0, ...ends.map((time) => time - start));
  const [unit, name] = span < 180 ? [1, "seconds"] : span < 10800 ? [60, "minutes"] : [3600, "hours"];
  return { of: (time) => (time - start) / unit, title: `${name} since the run started` };
}

function themeNow() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: colour("ink"), muted: colour("muted"), grid: colour("line"), accent: colour("accent"), panel: colour("panel"),
    nodes: Array.from({ length: COLOURS }, (_, index) => colour(`node-${index}`)), font: style.fontFamily,
  };
}

function baseLayout(theme) {
  return {
    margin: { l: 52, r: 10, t: 8, b: 46 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: theme.font, size: 12, color: theme.ink }, hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: theme.panel, bordercolor: theme.grid, font: { color: theme.ink } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, xanchor: "left" }, showlegend: true, uirevision: "kept",
  };
}

function baseAxis(theme) {
  return {
    gridcolor: theme.grid, linecolor: theme.grid, zerolinecolor: theme.grid, tickfont: { color: theme.muted },
    title: { font: { color: theme.muted, size: 12 } }, fixedrange: true, nticks: 7,
  };
}
