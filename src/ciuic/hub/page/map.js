// The map of links as SVG: the hub in the middle and the nodes on both sides; on a narrow page the nodes below the hub.
// It is drawn in real pixels for the width there is, so its text never shrinks.

import { svg } from "./dom.js";
import { count, duration, rate } from "./format.js";

// How a node's state looks: colour, line and sign together, never colour alone.
const LOOKS = {
  training: { tone: "ok", line: "solid", mark: "●" },
  idle: { tone: "calm", line: "solid", mark: "○" },
  assigned: { tone: "calm", line: "solid", mark: "◔" },
  draining: { tone: "warn", line: "long", mark: "◑" },
  suspect: { tone: "warn", line: "dashed", mark: "?" },
  dead: { tone: "bad", line: "dotted", mark: "✕" },
  left: { tone: "gone", line: "dotted", mark: "–" },
  evicted: { tone: "gone", line: "dotted", mark: "⊘" },
};

export function look(state) {
  return LOOKS[state] ?? { tone: "calm", line: "solid", mark: "·" };
}

export const LEGEND =
  "bold: measured, ↑ to the hub and ↓ from it; grey: what the node claims. Lines: solid = heard now, dashed = silent, dotted = dead or gone, long dashes = draining.";

const CARD = { width: 168, height: 64 };
const HUB = { width: 96, height: 62 };
const ROW = 112;
const BEND = 0.86; // how far a link runs level beside its node
const WIDE_PX = 700;
const MARGIN = 4;
const MANY = 8; // with more nodes, those that left are only in the Nodes view

// nodes: NodeInfo with {tokensPerS, note} added by the caller.
export function drawMap(container, nodes, hubNote) {
  const width = Math.max(280, Math.floor(container.clientWidth));
  if (nodes.length > MANY) nodes = nodes.filter((node) => look(node.state).tone !== "gone");
  const picture = width >= WIDE_PX ? wide(nodes, width, hubNote) : narrow(nodes, width, hubNote);
  const key = JSON.stringify([width, hubNote, nodes.map(visible)]);
  if (container.dataset.key === key) return;
  container.dataset.key = key;
  container.replaceChildren(picture);
}

function visible(node) {
  return [node.node_id, node.location, node.state, node.note, ...linkLines(node).map((line) => line.text)];
}

function wide(nodes, width, hubNote) {
  const onLeft = Math.ceil(nodes.length / 2);
  const rows = Math.max(1, onLeft);
  const height = rows * ROW + 2 * MARGIN;
  const hub = { x: (width - HUB.width) / 2, y: (height - HUB.height) / 2 };
  const root = frame(width, height, nodes);
  const cards = svg("g");
  nodes.forEach((node, index) => {
    const isLeft = index < onLeft;
    const column = isLeft ? onLeft : nodes.length - onLeft;
    const row = isLeft ? index : index - onLeft;
    const y = (height - column * ROW) / 2 + row * ROW + (ROW - CARD.height) / 2;
    const x = isLeft ? MARGIN : width - CARD.width - MARGIN;
    const from = { x: isLeft ? x + CARD.width : x, y: y + CARD.height / 2 };
    const to = { x: isLeft ? hub.x : hub.x + HUB.width, y: hub.y + HUB.height / 2 };
    // Level beside the node, where the label stands, then bent towards the hub.
    const bend = from.x + (to.x - from.x) * BEND;
    const path = `M${from.x} ${from.y} H${bend} C${(bend + to.x) / 2} ${from.y} ${(bend + to.x) / 2} ${to.y} ${to.x} ${to.y}`;
    root.append(link(node, path, { x: bend, y: from.y }));
    cards.append(card(node, x, y));
    label(root, node, isLeft ? { x: from.x + 8, anchor: "start" } : { x: from.x - 8, anchor: "end" }, from.y, [-9, 17, 32]);
  });
  root.append(cards, hubCard(hub.x, hub.y, hubNote));
  return root;
}

function narrow(nodes, width, hubNote) {
  const top = MARGIN + HUB.height + 12;
  const row = CARD.height + 74;
  const height = top + nodes.length * row + MARGIN;
  const root = frame(width, height, nodes);
  const trunk = MARGIN + 14;
  const x = trunk + 36;
  const middleOf = (index) => top + index * row + 58 + CARD.height / 2;
  if (nodes.length) root.append(svg("path", { class: "trunk", d: `M${trunk} ${MARGIN + HUB.height} V${middleOf(nodes.length - 1)}` }));
  nodes.forEach((node, index) => {
    const middle = middleOf(index);
    const y = middle - CARD.height / 2;
    root.append(link(node, `M${trunk} ${middle} H${x}`, { x: trunk + 18, y: middle }));
    label(root, node, { x, anchor: "start" }, y - 22, [-18, -3, 12]);
    root.append(card(node, x, y, Math.min(width - x - MARGIN, 260)));
  });
  root.append(hubCard(MARGIN, MARGIN, hubNote));
  return root;
}

// ---- parts ---------------------------------------------------------------------------------------------------------

function frame(width, height, nodes) {
  const states = nodes.map((node) => `${node.node_id} ${node.state}`).join(", ");
  return svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "map",
    "aria-label": nodes.length ? `links of the hub to ${states}; the Nodes view has the numbers` : "no node has joined yet",
  });
}

function link(node, path, middle) {
  const { tone, line, mark } = look(node.state);
  const group = svg("g", { class: "link", "data-tone": tone, "data-line": line }, svg("path", { d: path }));
  if (node.state === "dead") group.append(svg("text", { x: middle.x, y: middle.y + 5, class: "cut", "text-anchor": "middle" }, mark));
  return group;
}

function linkLines(node) {
  const { rtt_s: trip, rtt_jitter_s: jitter } = node.measured;
  const spread = jitter == null ? "" : `, varies by ${duration(jitter)}`;
  const claimed = node.claimed.bandwidth_gbit_s;
  return [
    { text: measuredRates(node.measured), class: "measured", title: "measured: node to hub, hub to node" },
    { text: trip == null ? "no round trip yet" : `round trip ${duration(trip)}`, class: "measured", title: `measured${spread}` },
    { text: claimed == null ? "nothing claimed" : `claimed ${rate(claimed * 1e9)}`, class: "claimed", title: "what the node's operator says" },
  ];
}

// Both rates with one unit: ↑ 47.2 ↓ 49.3 Mbit/s.
function measuredRates({ up_bits_per_s: up, down_bits_per_s: down }) {
  if (up == null || down == null) return "not measured yet";
  const [upNumber, upUnit] = rate(up).split(" ");
  const [downNumber, downUnit] = rate(down).split(" ");
  return upUnit === downUnit ? `↑ ${upNumber} ↓ ${downNumber} ${upUnit}` : `↑ ${rate(up)} ↓ ${rate(down)}`;
}

function label(root, node, { x, anchor }, y, offsets) {
  linkLines(node).forEach((line, index) => {
    const attributes = { x, y: y + offsets[index], class: line.class, "text-anchor": anchor };
    root.append(svg("text", attributes, line.text, svg("title", {}, line.title)));
  });
}

function card(node, x, y, width = CARD.width) {
  const { tone, mark } = look(node.state);
  const speed = node.tokensPerS == null ? "" : `${count(node.tokensPerS)} tokens/s`;
  const room = width - 20;
  return svg(
    "g",
    { class: "node", "data-tone": tone, transform: `translate(${x} ${y})` },
    svg("rect", { width, height: CARD.height, rx: 8 }),
    svg("text", { x: 10, y: 22, class: "name" }, fit(node.node_id, room, "650 14px"), svg("title", {}, `${node.node_id}, location ${node.location}`)),
    svg("text", { x: 10, y: 39, class: "state" }, `${mark} ${node.state}`),
    svg("text", { x: 10, y: 55, class: "detail" }, fit([speed, node.note].filter(Boolean).join(", "), room, "11.5px")),
  );
}

function hubCard(x, y, note) {
  const middle = { x: HUB.width / 2, "text-anchor": "middle" };
  return svg(
    "g",
    { class: "node hub", transform: `translate(${x} ${y})` },
    svg("rect", { width: HUB.width, height: HUB.height, rx: 8 }),
    svg("text", { ...middle, y: 28, class: "name" }, "hub"),
    svg("text", { ...middle, y: 48, class: "detail" }, fit(note, HUB.width - 12, "11.5px")),
  );
}

const ruler = document.createElement("canvas").getContext("2d");

// As much of the text as has room.
function fit(text, widthPx, font) {
  ruler.font = `${font} ${getComputedStyle(document.body).fontFamily}`;
  const isTooLong = (part) => ruler.measureText(part).width > widthPx;
  if (!isTooLong(text)) return text;
  let kept = text;
  while (kept && isTooLong(`${kept}…`)) kept = kept.slice(0, -1);
  return `${kept}…`;
}
