"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const narrow = () => window.innerWidth < 760;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const safe = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const known = (value) => value !== null && value !== undefined && value !== "";
const small = (value) => typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3;
const show = (value) => (known(value) ? (small(value) ? value.toExponential() : String(value)) : "-");

function element(parent, tag, text, className) {
  const made = parent.appendChild(document.createElement(tag));
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---------------------------------------------------------------- words

byId("state").textContent = run.state;
byId("verdict").className = run.verdict[0];
byId("verdict").textContent = run.verdict[1];
if (run.verdict[0] === "bad") document.querySelector("main").prepend(byId("verdicts")); // what to do comes before the figures
for (const [name, value] of run.setting) {
  element(document.querySelector("#setting dl"), "dt", name);
  element(document.querySelector("#setting dl"), "dd", value);
}
byId("setting").hidden = !run.setting.length;
byId("verdicts").hidden = !run.verdicts.length;
for (const [label, value] of run.tiles) {
  const tile = element(byId("tiles"), "div", undefined, "tile");
  element(tile, "b", value);
  element(tile, "span", label, "soft");
}
for (const id of ["map", "gates", "order", "stream", "use", "path", "stack", "loss"]) byId(id + "-note").textContent = run.notes[id];
for (const [title, text] of run.verdicts) {
  element(byId("verdicts"), "h3", title);
  element(byId("verdicts"), "pre", text);
}
byId("plan").textContent = run.plan || "not part of this file";

// ---------------------------------------------------------------- the table

const columns = run.columns.filter(([key]) => run.branches.some((b) => known(b[key])));
let sorted = { key: "depth", down: false };

function compare(a, b) {
  const [x, y] = [a[sorted.key], b[sorted.key]];
  if (!known(x) || !known(y)) return known(y) - known(x) || a.depth - b.depth; // what is unknown stays below in both directions
  const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
  return (sorted.down ? -order : order) || a.depth - b.depth;
}

function fillTable() {
  const wanted = byId("filter").value.toLowerCase();
  const body = document.createDocumentFragment();
  for (const branch of run.branches.filter((b) => b.name.toLowerCase().includes(wanted)).sort(compare)) {
    const row = element(body, "tr");
    row.dataset.depth = branch.depth;
    row.addEventListener("click", () => choose(branch.depth, false));
    for (const [key, , text] of columns) element(row, "td", show(branch[key]), text ? "name" : "");
  }
  document.querySelector("#table tbody").replaceChildren(body);
  for (const head of document.querySelectorAll("#table th")) {
    const own = head.dataset.key === sorted.key;
    head.setAttribute("aria-sort", own ? (sorted.down ? "descending" : "ascending") : "none");
  }
}

const heads = element(document.querySelector("#table thead"), "tr");
for (const [key, title, text] of columns) {
  const head = element(heads, "th", undefined, text ? "name" : "");
  head.dataset.key = key;
  const button = element(head, "button", title);
  button.type = "button";
  button.addEventListener("click", () => {
    sorted = { key, down: sorted.key === key && !sorted.down };
    fillTable();
  });
}
byId("filter").addEventListener("input", fillTable);
fillTable();

function choose(depth, scroll = true) {
  if (scroll && !document.querySelector(`#table tr[data-depth="${depth}"]`)) { byId("filter").value = ""; fillTable(); }
  for (const row of document.querySelectorAll("#table tbody tr")) row.classList.toggle("chosen", row.dataset.depth === String(depth));
  if (scroll) document.querySelector("#table tr.chosen")?.scrollIntoView({ block: "center" });
  const line = { type: "line", xref: "paper", x0: 0, x1: 1, y0: depth, y1: depth, line: { color: colour("last"), width: 2, dash: "dot" } };
  if (run.steps.length && window.Plotly) Plotly.relayout(byId("map"), { shapes: [line] });
}

function asCsv() {
  const cell = (value) => (known(value) ? (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value)) : "");
  const rows = [...run.branches].sort(compare).map((b) => columns.map(([key]) => cell(b[key])).join(","));
  return [columns.map(([, title]) => cell(title)).join(","), ...rows].join("\r\n") + "\r\n";
}

byId("save").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([asCsv()], { type: "text/csv" }));
  link.download = "branches.csv";
  link.click();
  URL.revokeObjectURL(link.href);
});

// ---------------------------------------------------------------- the figures

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const shade = (part) => VIRIDIS[Math.min(9, Math.floor(part * 10))];
const about = (b) => `<b>${safe(b.name)}</b>` + (b.gate ? `<br>${safe(b.kind)} ${safe(b.gate)}` : "");

function layout(x, y, more = {}) {
  const [text, line, back] = [colour("text"), colour("line"), colour("card")];
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    margin: { l: 50, r: 12, t: 8, b: 42 }, hovermode: "closest", showlegend: false,
    hoverlabel: { bgcolor: back, bordercolor: line, font: { color: text }, align: "left" },
    xaxis: { ...axis, title: { text: x, standoff: 8 }, ...more.xaxis },
    yaxis: { ...axis, title: { text: y, standoff: 6 }, ...more.yaxis },
    ...more.rest,
  };
}

function depthAxis() {
  const all = run.branches, count = Math.min(narrow() ? 6 : 12, all.length);
  const marks = [...new Set([...Array(count).keys()].map((i) => Math.round((i * (all.length - 1)) / Math.max(1, count - 1))))];
  const names = narrow() ? marks.map(String) : marks.map((i) => (all[i].name.length > 28 ? "…" + all[i].name.slice(-27) : all[i].name));
  return { tickvals: marks, ticktext: names.map(safe), range: [-0.5, all.length - 0.5] };
}

function heatMap() {
  const low = Math.log10(run.lowest);
  const z = run.ratio.map((row) => row.map((v) => (v === null ? null : Math.max(low, Math.log10(Math.max(v, 1e-300))))));
  const text = run.rows.map((depth, i) => run.steps.map((step, j) =>
    `${about(run.branches[depth])}<br>step ${step}<br>variance ratio ${show(run.ratio[i][j])}` +
    `<br>|g| ${show(run.g[i][j])}<br>gate gradient ${show(run.grad[i][j])}`));
  const high = Math.max(0, ...z.map((row) => row.reduce((a, b) => Math.max(a, b ?? a), low)));
  const powers = [...Array(Math.floor(high) - Math.ceil(low) + 1).keys()].map((i) => Math.ceil(low) + i);
  const map = {
    type: "heatmap", x: run.steps, y: run.rows, z, text, hoverinfo: "text", colorscale: "Viridis", zmin: low, zmax: high,
    colorbar: {
      title: { text: narrow() ? "" : "Var(branch) / Var(stream)", side: "right" }, tickvals: powers, thickness: 12,
      ticktext: powers.map((p) => (p === Math.ceil(low) ? "≤" : "") + `10<sup>${p}</sup>`),
    },
  };
  return [[map, switchingOn()], overDepth()];
}

function switchingOn() {
  const on = run.branches.filter((b) => b.on !== null);
  return {
    type: "scatter", mode: "markers", x: on.map((b) => b.on), y: on.map((b) => b.depth), hoverinfo: "text",
    text: on.map((b) => `${about(b)}<br>switched on at step ${b.on}, number ${b.order}`),
    marker: { size: on.length > 150 ? 4 : 7, color: "#ffffff", line: { color: "#000000", width: 1 } },
  };
}

function overDepth() {
  return layout("optimizer step", narrow() ? "depth" : "", { yaxis: { ...depthAxis(), showgrid: false }, xaxis: { showgrid: false } });
}

// ---------------------------------------------------------------- who carries the loss

const path = run.attribution;

function pathMap() {
  const linear = path.largest / 50, most = Math.asinh(50); // linear around zero, in powers beyond
  const text = run.rows.map((depth, i) => path.steps.map((step, j) =>
    `${about(run.branches[depth])}<br>step ${step}<br>taken off the loss ${show(path.values[i][j])}`));
  const marks = [-1, -0.1, 0, 0.1, 1];
  const map = {
    type: "heatmap", x: path.steps, y: run.rows, text, hoverinfo: "text", zmin: -most, zmax: most,
    z: path.values.map((row) => row.map((v) => (v === null ? null : Math.asinh(v / linear)))),
    colorscale: [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#f7f7f7"], [0.75, "#92c5de"], [1, "#2166ac"]],
    colorbar: {
      title: { text: narrow() ? "" : "taken off the loss", side: "right" }, thickness: 12,
      tickvals: marks.map((m) => Math.asinh(50 * m)), ticktext: marks.map((m) => String(Number((m * path.largest).toPrecision(2)))),
    },
  };
  return [[map, switchingOn()], overDepth()];
}

function pathStack() {
  const { labels, depths, values } = path.bands;
  const traces = [];
  for (const [group, pick] of [["up", (v) => Math.max(v, 0)], ["down", (v) => Math.min(v, 0)]]) {
    values.forEach((row, i) => {
      const part = row.map((v) => pick(v ?? 0));
      if (group === "down" && part.every((v) => v === 0)) return;
      traces.push({
        type: "scatter", mode: "lines", x: path.steps, y: part, stackgroup: group, line: { width: 0.3, color: colour("card") },
        fillcolor: shade(depths[i]), hoverinfo: "text", text: row.map((v, j) => `<b>${safe(labels[i])}</b><br>step ${path.steps[j]}<br>taken off the loss ${show(v)}`),
      });
    });
  }
  const line = (y, dash, name) => ({
    type: "scatter", mode: path.steps.length > 1 ? "lines" : "markers", x: path.steps, y, name, line: { color: colour("text"), width: 2, dash },
    hoverinfo: "text", text: y.map((v, j) => `${name}<br>step ${path.steps[j]}<br>${show(v)}`),
  });
  traces.push(line(path.sum, "solid", "sum over all branches"), line(path.joint, "dot", "closing all of them"));
  const marks = run.branches.filter((b) => b.on !== null).map((b) => ({
    type: "line", xref: "x", yref: "paper", x0: b.on, x1: b.on, y0: 0, y1: 0.04,
    line: { width: 1.5, color: shade(b.depth / Math.max(1, run.branches.length - 1)) },
  }));
  return [traces, layout("optimizer step", "taken off the loss", { rest: { shapes: marks } })];
}

function pathLoss() {
  const mode = path.steps.length > 1 ? "lines" : "markers";
  const line = (y, name, tone) => ({
    type: "scatter", mode, x: path.steps, y, name, line: { color: colour(tone), width: 2 }, hoverinfo: "text",
    text: y.map((v, j) => `${name}<br>step ${path.steps[j]}<br>loss ${show(v)}`),
  });
  const rest = { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 50, r: 12, t: 30, b: 42 } };
  return [[line(path.loss, "as it is", "last"), line(path.closed, "all gates closed", "first")], layout("optimizer step", "loss held out", { rest })];
}

if (!path) for (const card of document.querySelectorAll(".path-card")) card.hidden = true;

function gateCurves() {
  const every = Math.max(1, Math.ceil(run.rows.length / run.curves));
  const of = byId("gates-of").value, name = of === "g" ? "largest |g|" : "gradient of the gate";
  const lines = run.rows.map((depth, i) => [run.branches[depth], run[of][i]]).filter((_, i) => i % every === 0);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches; // keep away from the end that looks like the page
  const traces = lines.map(([branch, g]) => ({
    type: "scatter", mode: run.steps.length > 1 ? "lines" : "markers", x: run.steps, y: g, hoverinfo: "text",
    text: run.steps.map((step, j) => `${about(branch)}<br>step ${step}<br>${name} ${show(g[j])}`), meta: branch.depth,
    line: { width: 1.5, color: shade(branch.depth / run.branches.length * 0.85 + (dark ? 0.15 : 0)) },
  }));
  const axis = byId("gates-log").checked ? { type: "log", exponentformat: "power" } : { rangemode: "tozero" };
  return [traces, layout("optimizer step", name, { yaxis: axis })];
}

function orderFigure() {
  const on = run.branches.filter((b) => b.on !== null);
  const dots = {
    type: "scatter", mode: "markers", x: on.map((b) => b.order), y: on.map((b) => b.depth), hoverinfo: "text",
    text: on.map((b) => `${about(b)}<br>number ${b.order}, at step ${b.on}`),
    marker: {
      size: on.length > 150 ? 5 : 9, color: on.map((b) => b.on), colorscale: "Viridis", line: { color: colour("soft"), width: 0.5 },
      colorbar: { title: { text: "step", side: "right" }, thickness: 12 },
    },
  };
  return [[dots], layout("order of switching on", narrow() ? "depth" : "", { yaxis: depthAxis() })];
}

function streamFigure() {
  const trace = (values, name, dash, tone, symbol) => ({
    type: "scatter", mode: run.branches.length > 80 ? "lines" : "lines+markers", name, x: run.branches.map((b) => b.depth), y: values,
    text: run.branches.map((b, i) => `${about(b)}<br>${name}<br>Var(stream) ${show(values[i])}`), hoverinfo: "text",
    line: { dash, color: colour(tone), width: 2 }, marker: { symbol, size: 6 },
  });
  const traces = [
    trace(run.stream.first, `step ${run.stream.from}`, "dot", "first", "circle-open"),
    trace(run.stream.last, `step ${run.stream.to}`, "solid", "last", "diamond"),
  ];
  const rest = { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, margin: { l: 50, r: 12, t: 30, b: 42 } };
  const digits = run.stream.decades > 1 ? { type: "log", exponentformat: "power" } : { rangemode: "tozero" };
  return [traces, layout("depth (branch, first to last)", "Var(stream)", { yaxis: digits, rest })];
}

const measured = run.branches.filter((b) => known(b.use));
if (!measured.length) {
  byId("use-card").hidden = true;
  byId("stream-card").classList.add("wide");
}

function usefulnessFigure() {
  const dots = {
    type: "scatter", mode: "markers", x: measured.map((b) => b.order ?? run.branches.length + 1), y: measured.map((b) => b.use),
    text: measured.map((b) => `${about(b)}<br>${b.order === null ? "never switched on" : "number " + b.order}<br>usefulness ${b.use}`),
    hoverinfo: "text",
    marker: {
      size: 8, color: measured.map((b) => b.depth), colorscale: "Viridis", line: { color: colour("soft"), width: 0.5 },
      symbol: measured.map((b) => (b.order === null ? "x" : "circle")), colorbar: { title: { text: "depth", side: "right" }, thickness: 12 },
    },
  };
  return [[dots], layout("order of switching on (× never)", "loss without the branch, minus loss", { yaxis: { exponentformat: "power" } })];
}

const FIGURES = { map: heatMap, ...(path ? { path: pathMap, stack: pathStack, loss: pathLoss } : {}), gates: gateCurves, order: orderFigure, stream: streamFigure };
if (measured.length) FIGURES.use = usefulnessFigure;
if (!run.steps.length) for (const id of ["map", "gates", "stream"]) drop(id); // a run that was stopped has no figures yet
if (!run.branches.some((b) => b.on !== null)) drop("order");

function drop(id) {
  delete FIGURES[id];
  byId(id).closest(".card").hidden = true;
}

const depthOf = { map: (p) => p.y, path: (p) => p.y, order: (p) => p.y, gates: (p) => p.data.meta, stream: (p) => p.x, use: (p) => measured[p.pointIndex].depth };

async function draw(only) {
  for (const [id, figure] of Object.entries(FIGURES)) {
    if (typeof only === "string" && only !== id) continue;
    const [traces, shape] = figure();
    const options = {
      responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover", scrollZoom: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], toImageButtonOptions: { format: "svg", filename: "resinit-" + id },
    };
    if (narrow()) shape.dragmode = false; // a finger scrolls the page
    await Plotly.react(byId(id), traces, shape, options);
    byId(id).removeAllListeners?.("plotly_click");
    if (depthOf[id]) byId(id).on("plotly_click", ({ points: [point] }) => choose(depthOf[id](point)));
  }
  document.documentElement.dataset.drawn = "yes";
}

async function loadPlotly() {
  const packed = Uint8Array.from(atob(byId("plotly").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.appendChild(script);
}

function trouble(error) {
  byId("trouble").textContent = `The figures could not be drawn (${error}); they need a browser of 2023 or later. Tables and words are complete.`;
  byId("trouble").hidden = false;
}

loadPlotly().then(draw).then(() => {
  let was = narrow();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const id of ["gates-of", "gates-log"]) byId(id).addEventListener("change", () => draw("gates"));
  window.addEventListener("resize", () => { if (narrow() !== was) { was = narrow(); draw(); } });
}).catch(trouble);
