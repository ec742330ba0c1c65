// 2. Layers × heads.
function spanOf(values) {
  const sorted = [...values].sort((x, y) => x - y);
  if (!sorted.length) return [0, 1];
  const at = (q) => sorted[Math.round(q * (sorted.length - 1))];
  const [low, high] = [at(0.01), at(0.99)];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}
const ownSpan = (metric) => (metric.categories.length ? [0, metric.categories.length - 1 || 1] : spanOf(defined(metric.values[data.model.weights])));
const ticksOf = (metric) => (metric.categories.length ? { tickvals: metric.categories.map((_, i) => i), ticktext: metric.categories.map(plain) } : {});
// Distributions over heads of the model and its control models on one axis, in the colours of the map.
function drawRange() {
  if (!data.metrics[chosen.metric]) return;
  const { data: traces, layout } = modelCharts().range[chosen.metric];
  const annotations = layout.annotations.map((note) => (note.name === chosen.weights ? { ...note, text: note.text.replace(note.name, `<b>${note.name}</b>`) } : note));
  // Plotly warns about numbers as colours of bars, though it draws them.
  const painted = ({ color, cmin, cmax, line }) => ({ color: color.map((bin) => colourAt(VIRIDIS, (bin - cmin) / (cmax - cmin))), line });
  draw("range", { data: traces.map((bars) => ({ ...bars, marker: painted(bars.marker) })), layout: { ...layout, annotations } });
}
// The frame around the chosen head, an element above the map, which would take long to draw again.
function placeBox() {
  const { _size: size, xaxis, yaxis } = by("map")._fullLayout ?? {};
  by("chosen-head").hidden = !size || by("map").hidden;
  if (!size) return;
  const [x0, x1, y0, y1] = [...xaxis.range, ...yaxis.range];
  const [width, height] = [size.w / (x1 - x0), size.h / (y1 - y0)];
  const place = { left: size.l + width * (chosen.head - 0.5 - x0), top: size.t + height * (y1 - data.model.layers[chosen.layer] - 0.5), width, height };
  for (const [name, x] of Object.entries(place)) by("chosen-head").style[name] = `${x}px`;
}
// The map of a metric, whose colours span the given values.
function mapChart(model, metric, weights, [zmin, zmax]) {
  const { layers } = all.models[model].model;
  const { data: [cells], layout } = CHARTS.models[model].map;
  const z = gridOf(all.models[model], metric.values[weights] || []);
  const text = z.map((row, l) => row.map((value, h) => `layer ${layers[l]}, head ${h}<br>${plain(metric.title)}: ${plain(inWords(metric, value))}`));
  const colorbar = { ...cells.colorbar, title: { text: plain(metric.unit) }, ...ticksOf(metric) };
  return { data: [{ ...cells, z, x: [...z[0].keys()], y: layers, zmin, zmax, text, colorbar }], layout };
}
function drawMap() {
  const { layers } = data.model;
  const metric = data.metrics[chosen.metric];
  if (!metric) return;
  const { data: [cells], layout } = mapChart(chosen.model, metric, chosen.weights, ownSpan(metric));
  // Heads that the filter hides are covered by the colour of the page.
  const z = cells.z.map((row) => row.map(() => null));
  for (const row of rows) if (!row.shown) z[row.l][row.h] = 1;
  const back = isDark() ? "#15161a" : "#ffffff";
  const cover = { type: "heatmap", z, x: cells.x, y: layers, zmin: 0, zmax: 1, colorscale: [[0, back], [1, back]], opacity: 0.85, showscale: false, hoverinfo: "skip" };
  draw("map", { data: [cells, cover], layout: { ...layout, dragmode: false } });
  const place = by("map");
  placeBox();
  place.removeAllListeners("plotly_afterplot");
  place.on("plotly_afterplot", placeBox);
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", (event) => {
    const l = layers.indexOf(event.points[0].y);
    if (event.points[0].x < data.model.heads[l]) openHead(l, event.points[0].x, event.event);
  });
}
const numbersOfHeadsWith = (metric, weights) => data.model.layers.flatMap((layer, l) => (metric.values[weights]?.[l] ?? []).map((x, h) => [layer, h, named(metric, x)]));
function numbersOfMap() {
  const metric = data.metrics[chosen.metric];
  return [["layer", "head", `${metric.title} (${chosen.weights})`], ...numbersOfHeadsWith(metric, chosen.weights)];
}
function numbersOfRange() {
  const metric = data.metrics[chosen.metric];
  return [["weights", "layer", "head", metric.title], ...Object.keys(metric.values).flatMap((name) => numbersOfHeadsWith(metric, name).map((line) => [name, ...line]))];
}
// The chosen metric in words, and the weights it was measured with.
function writeMetric() {
  const metric = data.metrics[chosen.metric];
  by("map").hidden = !metric;
  const control = metric && metric.control !== null ? ` Control (${metric.control_title}): ${show(metric.control)}.` : "";
  const size = metric ? sizeOf(metric.measurement) : "";
  by("reading").replaceChildren();
  if (metric) termLink(by("reading"), metric.title, metric.id);
  by("reading").append(metric ? `: ${metric.reading}${control}${size && ` ${metric.categories.length ? "Commonest of" : "Mean over"} ${size}.`}` : "No number of single heads was measured for this model.");
  const names = metric ? Object.keys(metric.values) : [];
  const missing = metric && !names.includes(chosen.weights) ? chosen.weights : "";
  if (!names.includes(chosen.weights)) chosen.weights = data.model.weights;
  by("weights-note").textContent = missing ? `${metric.title} was not measured with ${missing} weights: the map shows ${chosen.weights}.` : "";
  fill(by("weights"), names.map((name) => [name, name]));
  by("weights").value = chosen.weights;
}
// The first ten of these that were measured are listed first; diagnostics of the measurements are last.
const MAIN = ["r", "unique_a", "unique_c", "s_pos_no_sink", "s_sym_no_sink", "sink_mass", "previous_token", "induction", "retrieval", "removal_loss", "entropy"];
const DIAGNOSTICS = ["effective_swaps", "swap_bound", "swaps_kept", "q_rank", "k_rank", "rank_one_q", "rank_one_k", "rank_one_q_centred", "rank_one_k_centred", "turning_q", "turning_k"];
let listsAll = false;
// Metrics in groups: the main ones, and on request one group for each measurement and the diagnostics.
function fillMetrics() {
  const main = MAIN.filter((id) => data.metrics.some((metric) => metric.id === id)).slice(0, 10);
  const groupOf = ({ id, group }) => (main.includes(id) ? "main metrics" : DIAGNOSTICS.includes(id) ? "diagnostics" : group);
  const measured = data.metrics.map(groupOf).filter((group) => !["main metrics", "diagnostics"].includes(group));
  const isShort = main.length > 0 && main.length < data.metrics.length;
  by("more-metrics").hidden = !isShort;
  listsAll = listsAll || !isShort || !main.includes(data.metrics[chosen.metric].id);
  by("more-metrics").setAttribute("aria-pressed", String(listsAll));
  by("metric").replaceChildren();
  for (const group of ["main metrics", ...(listsAll ? [...new Set(measured), "diagnostics"] : [])]) {
    const members = data.metrics.map((metric, i) => ({ metric, i })).filter(({ metric }) => groupOf(metric) === group);
    members.sort((x, y) => main.indexOf(x.metric.id) - main.indexOf(y.metric.id));
    const place = members.length ? make(by("metric"), "optgroup", null, { label: group }) : null;
    for (const { metric, i } of members) make(place, "option", metric.title, { value: i, title: metric.reading });
  }
  by("metric").value = chosen.metric;
}
const isWide = matchMedia("(min-width: 64rem)");
// What a click on a head does: it opens the head, and with Shift shows it beside the chosen one.
function openHead(layer, head, event) {
  if (event.shiftKey) compareWith([layer, head]);
  else choose(layer, head, true);
}
// Show a head; a click leads to its panel where that is not beside the map.
function choose(layer, head, go = false) {
  const other = data.model.heads[layer] !== by("head").options.length;
  chosen.layer = layer;
  chosen.head = Math.min(head, data.model.heads[layer] - 1);
  if (other) fillHeads();
  writePanel();
  selectRow();
  redrawPanel();
  saveView();
  if (go && !isWide.matches) by("panel").scrollIntoView();
  placeBox();
  placeThumbnailBox();
}
function listenToMap() {
  by("more-metrics").addEventListener("click", () => {
    listsAll = !listsAll;
    fillMetrics();
  });
  by("metric").addEventListener("change", (event) => {
    chosen.metric = +event.target.value;
    writeMetric();
    writePanel();
    writeHeads();
    redraw("map", "range");
  });
  by("weights").addEventListener("change", (event) => {
    chosen.weights = event.target.value;
    by("weights-note").textContent = "";
    writePanel();
    redraw("map", "range", "place", "curve");
    saveView();
  });
  by("layer").addEventListener("change", (event) => choose(+event.target.value, chosen.head));
  by("head").addEventListener("change", (event) => choose(chosen.layer, +event.target.value));
  by("map").addEventListener("keydown", (event) => walkHeads(event, STEPS));
}
