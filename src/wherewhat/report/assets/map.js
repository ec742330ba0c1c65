// 2. Layers × heads.
function spanOf(values) {
  const sorted = [...values].sort((x, y) => x - y);
  if (!sorted.length) return [0, 1];
  const at = (q) => sorted[Math.round(q * (sorted.length - 1))];
  const [low, high] = [at(0.01), at(0.99)];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}
const box = () => ({ x0: chosen.head - 0.5, x1: chosen.head + 0.5, y0: data.model.layers[chosen.layer] - 0.5, y1: data.model.layers[chosen.layer] + 0.5 });
function drawMap() {
  const { layers } = data.model;
  const metric = data.metrics[chosen.metric];
  if (!metric) return;
  const z = gridOf(data, metric.values[chosen.weights] || []);
  const text = z.map((row, l) => row.map((x, h) => `layer ${layers[l]}, head ${h}<br>${plain(metric.title)}: ${show(x)} ${plain(metric.unit)}`));
  const [zmin, zmax] = spanOf(Object.values(metric.values).flat(2).filter((x) => x !== null && x !== undefined));
  const most = z[0].length;
  const x = [...Array(most).keys()];
  const trace = {
    type: "heatmap", z, x, y: layers, zmin, zmax, colorscale: "Viridis", text,
    hoverinfo: "text", xgap: 1, ygap: 1, colorbar: { thickness: 12, len: 1 },
  };
  // Heads that the filter hides are covered by the colour of the page.
  const hidden = z.map((row) => row.map(() => null));
  for (const row of rows) if (row.line.hidden) hidden[row.l][row.h] = 1;
  const back = isDark() ? "#15161a" : "#ffffff";
  const cover = { type: "heatmap", z: hidden, x, y: layers, zmin: 0, zmax: 1, colorscale: [[0, back], [1, back]], opacity: 0.85, showscale: false, hoverinfo: "skip" };
  draw("map", [trace, cover], {
    xaxis: { ...axisTitle("head"), dtick: most > 12 ? 4 : 1, showgrid: false },
    yaxis: { ...axisTitle("layer"), dtick: layers.length > 12 ? 5 : 1, showgrid: false },
    shapes: [{ type: "rect", ...box(), line: { color: "#ff4d9d", width: 3 } }],
  });
  const place = by("map");
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", (event) => {
    const l = layers.indexOf(event.points[0].y);
    if (event.points[0].x < data.model.heads[l]) choose(l, event.points[0].x, true);
  });
}
// The chosen metric in words, and the weights it was measured with.
function writeMetric() {
  const metric = data.metrics[chosen.metric];
  by("map").hidden = !metric;
  const control = metric && metric.control !== null ? ` Control (${metric.control_title}): ${show(metric.control)}.` : "";
  by("reading").textContent = metric ? `${metric.reading}${control}` : "No number of single heads was measured for this model.";
  const names = metric ? Object.keys(metric.values) : [];
  if (!names.includes(chosen.weights)) chosen.weights = data.model.weights;
  fill(by("weights"), names.map((name) => [name, name]));
  by("weights").value = chosen.weights;
}
function fillHeads() {
  fill(by("head"), Array.from({ length: data.model.heads[chosen.layer] }, (_, h) => [h, h]));
}
const isWide = matchMedia("(min-width: 64rem)");
// Show a head; a click leads to its panel where that is not beside the map.
function choose(layer, head, go = false) {
  const other = data.model.heads[layer] !== by("head").options.length;
  chosen.layer = layer;
  chosen.head = Math.min(head, data.model.heads[layer] - 1);
  if (other) fillHeads();
  writePanel();
  selectRow();
  redraw(...PANEL);
  saveView();
  if (go && !isWide.matches) by("panel").scrollIntoView();
  if (data.metrics.length && !charts.get("map").stale) Plotly.relayout(by("map"), Object.fromEntries(Object.entries(box()).map(([name, x]) => [`shapes[0].${name}`, x])));
}
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
function listenToMap() {
  by("metric").addEventListener("change", (event) => {
    chosen.metric = +event.target.value;
    writeMetric();
    writeHeads();
    redraw("map");
  });
  by("weights").addEventListener("change", (event) => {
    chosen.weights = event.target.value;
    redraw("map");
    saveView();
  });
  by("layer").addEventListener("change", (event) => choose(+event.target.value, chosen.head));
  by("head").addEventListener("change", (event) => choose(chosen.layer, +event.target.value));
  by("map").addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (event.key === "Enter") by("panel").focus();
    if (!step) return;
    event.preventDefault();
    const layer = Math.min(Math.max(chosen.layer + step[0], 0), data.model.layers.length - 1);
    choose(layer, Math.max(chosen.head + step[1], 0));
  });
}
