"use strict";
// Draws the charts from the JSON in the page, in the colours of the reader's theme; again when the theme changes.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(layout) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
  const result = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--muted") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
  };
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    const title = layout[name].title && { ...layout[name].title, font: { size: 13 } };
    result[name] = { ...axis, automargin: true, ...layout[name], ...(title && { title }) };
  }
  return result;
}

function draw() {
  for (const [id, chart] of Object.entries(charts)) {
    const options = { displayModeBar: false, responsive: true };
    Plotly.react(id, chart.data, themed(chart.layout), options);
  }
}

draw();
dark.addEventListener("change", draw);
