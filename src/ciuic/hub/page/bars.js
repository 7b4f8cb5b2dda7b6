// Where the time of each node goes, as stacked bars: every part has a pattern and, where there is room, its share in words.

import { h, svg } from "./dom.js";
import { percent } from "./format.js";
import { timeShares } from "./model.js";

const PARTS = [
  { name: "compute", label: "compute", pattern: null },
  { name: "communication", label: "exposed communication", pattern: "M0 8 8 0M-2 2 2 -2M6 10 10 6" },
  { name: "data", label: "data", pattern: "M4 0V8" },
  { name: "other", label: "other", pattern: "M4 3.5h1v1h-1z" },
];
const BAR = { height: 26, step: 52 };
const ROOM_PX = 40; // a share is written into its part when that is so wide

// nodes: NodeInRun. Draws only when something has changed.
export function drawBars(container, nodes) {
  const width = Math.max(240, Math.floor(container.clientWidth));
  const timed = nodes.map((node) => ({ name: node.node_id, shares: timeShares(node) })).filter(({ shares }) => shares);
  const key = JSON.stringify([width, timed.map(({ name, shares }) => [name, ...PARTS.map((part) => shares[part.name].toFixed(3))])]);
  if (container.dataset.key === key) return;
  container.dataset.key = key;
  container.replaceChildren(...(timed.length ? [legend(), picture(timed, width)] : [h("p", { class: "empty" }, "no node has trained yet")]));
}

function legend() {
  const items = PARTS.map((part) => h("li", {}, swatch(part), part.label));
  return h("ul", { class: "bar-legend" }, ...items);
}

function swatch(part) {
  return svg("svg", { width: 22, height: 14, "aria-hidden": "true" }, patterns(`key-${part.name}`), ...box(part, 0, 0, { width: 22, height: 14 }, `key-${part.name}`));
}

function picture(timed, width) {
  const words = timed.map(({ name, shares }) => `${name}: ${PARTS.map((part) => `${part.label} ${percent(shares[part.name], 1)}`).join(", ")}`);
  const root = svg("svg", { width, height: timed.length * BAR.step, class: "bars", role: "img", "aria-label": words.join("; ") }, patterns("bar"));
  timed.forEach(({ name, shares }, index) => {
    const y = index * BAR.step;
    root.append(svg("text", { x: 0, y: y + 14, class: "name" }, name));
    let x = 0;
    for (const part of PARTS) {
      const size = { width: shares[part.name] * width, height: BAR.height };
      const boxes = box(part, x, y + 20, size, "bar");
      const title = svg("title", {}, `${name}, ${part.label}: ${percent(shares[part.name], 1)}`);
      root.append(svg("g", {}, title, ...boxes, written(shares[part.name], x + size.width / 2, y + 20, size.width)));
      x += size.width;
    }
  });
  return root;
}

function box(part, x, y, size, prefix) {
  const plainBox = svg("rect", { x, y, ...size, class: `part ${part.name}` });
  return part.pattern ? [plainBox, svg("rect", { x, y, ...size, fill: `url(#${prefix}-${part.name})` })] : [plainBox];
}

function written(share, x, y, width) {
  if (width < ROOM_PX) return svg("g");
  return svg("text", { x, y: y + BAR.height / 2 + 4.5, class: "share", "text-anchor": "middle" }, percent(share));
}

function patterns(prefix) {
  const made = PARTS.filter((part) => part.pattern).map((part) => {
    const attributes = { id: `${prefix}-${part.name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    return svg("pattern", attributes, svg("path", { d: part.pattern, class: "hatch" }));
  });
  return svg("defs", {}, ...made);
}
