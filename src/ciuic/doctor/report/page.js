"use strict";
// The line below each heat map says in words what the cell under the pointer is.
for (const holder of document.querySelectorAll("script.cells")) {
  const map = JSON.parse(holder.textContent);
  const picture = document.getElementById(holder.dataset.for);
  const readout = document.getElementById(`${holder.dataset.for}-readout`);
  const atFirst = readout.textContent;
  const planes = Object.entries(map.ranks).map(([rank, texts]) => [rank, texts.map((text) => atob(text))]);

  const length = (byte, [middle, steps]) => (10 ** ((byte - middle) / steps)).toExponential(1);

  function words(rank, [moved, grads, flags], at) {
    const [m, g, f] = [moved, grads, flags].map((plane) => plane.charCodeAt(at));
    const parts = [m ? `moved ${length(m, map.moved)} of its length` : "did not move"];
    if (g) parts.push(`gradient ${length(g, map.grad)}`);
    for (const [bit, text] of Object.entries(map.flags)) if (f & bit) parts.push(text);
    return `rank ${rank}: ${parts.join(", ")}`;
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - map.left) / map.cell[0]);
    const row = Math.floor((event.clientY - box.top - map.top) / map.cell[1]);
    if (!(row in map.modules) || !(column in map.steps)) return;
    const at = row * map.steps.length + column;
    const said = planes.map(([rank, plane]) => words(rank, plane, at));
    const alike = new Set(said.map((text) => text.replace(/^rank \d+: /, ""))).size === 1 && said.length > 1;
    const shown = alike ? `all ranks: ${said[0].replace(/^rank \d+: /, "")}` : said.join("; ");
    readout.textContent = `${map.modules[row] || "(the model itself)"}, step ${map.steps[column]}: ${shown}`;
  });
  picture.addEventListener("pointerleave", () => { readout.textContent = atFirst; });
}
