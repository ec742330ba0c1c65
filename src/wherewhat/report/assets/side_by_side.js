// Several models side by side: numbers with differences, maps on one colour scale, heads by rank, and head by head.
const sharedMetrics = () => {
  const everywhere = (id) => all.models.every((one) => one.metrics.some((metric) => metric.id === id));
  return all.models[0].metrics.filter((metric) => everywhere(metric.id));
};
const metricOf = (model, id) => model.metrics.find((one) => one.id === id);
const own = (model, id) => metricOf(model, id).values[model.model.weights] || [];
const isNumber = (x) => x !== null && x !== undefined;
function gridOf(model, values) {
  const most = Math.max(...model.model.heads);
  return model.model.layers.map((_, l) => Array.from({ length: most }, (_, h) => (values[l] ? values[l][h] ?? null : null)));
}
function writeComparison() {
  by("comparison").hidden = false;
  by("which").hidden = false;
  fill(by("model"), all.models.map((one, i) => [i, one.model.name]));
  const cell = (value) => (value ? withInterval(value) : "–");
  const { numbers, pairs } = all.comparison;
  const named = (row) => (numbers.some((other) => other.title === row.title && other.name !== row.name) ? `${row.title}: ${row.name}` : row.title);
  table(by("side-by-side"),
    ["number", "model", "value", "one random control", `minus ${all.models[0].model.name}`, "interval of the difference"],
    numbers.map((row) => [named(row), row.model, cell(row.value), cell(row.control), cell(row.difference), row.over]));
  const metrics = sharedMetrics();
  fill(by("shared-metric"), metrics.map((metric) => [metric.id, `${metric.title} (${metric.measurement})`]));
  by("shared").hidden = !metrics.length;
  by("unshared").hidden = metrics.length > 0;
  // Without a metric there would be nothing to draw when the page is printed.
  const drawn = (metrics.length ? all.models : []).map((one, i) => {
    const figure = make(by("maps"), "figure");
    make(figure, "div", null, { id: `map-${i}`, class: "chart", role: "img", "aria-label": `Map of ${one.model.name}` });
    make(figure, "figcaption", one.model.name);
    chart(`map-${i}`, () => drawSharedMap(i));
    return `map-${i}`;
  });
  if (metrics.length) {
    writeReading();
    chart("ranks", drawRanks);
    drawn.push("ranks", ...pairs.flatMap((pair, i) => startPair(pair, i)));
  }
  all.models.forEach((one, i) => {
    if (!one.swaps) return;
    const figure = make(by("planes-of-all"), "figure");
    make(figure, "div", null, { id: `plane-${i}`, class: "chart", role: "img", "aria-label": `Positional and symbolic scores of ${one.model.name}` });
    make(figure, "figcaption", `${one.model.name}: positional and symbolic scores, coloured by layer`);
    chart(`plane-${i}`, () => drawSharedPlane(i));
  });
  by("shared-metric").addEventListener("change", () => {
    writeReading();
    pairs.forEach(writePair);
    redraw(...drawn);
  });
  by("model").addEventListener("change", (event) => chooseModel(+event.target.value));
}
const writeReading = () => (by("shared-reading").textContent = metricOf(all.models[0], by("shared-metric").value).reading);
function sharedSpan(id) {
  return spanOf(all.models.flatMap((one) => own(one, id).flat()).filter(isNumber));
}
function drawSharedMap(i) {
  const one = all.models[i];
  const id = by("shared-metric").value;
  const metric = metricOf(one, id);
  const z = gridOf(one, own(one, id));
  const [zmin, zmax] = sharedSpan(id);
  const text = z.map((row, l) => row.map((x, h) => `layer ${one.model.layers[l]}, head ${h}<br>${plain(metric.title)}: ${show(x)} ${plain(metric.unit)}`));
  const trace = { type: "heatmap", z, x: z[0].map((_, h) => h), y: one.model.layers, zmin, zmax, colorscale: "Viridis", text, hoverinfo: "text", xgap: 1, ygap: 1, colorbar: { thickness: 10 } };
  draw(`map-${i}`, [trace], { xaxis: { ...axisTitle("head"), dtick: z[0].length > 12 ? 4 : 1, showgrid: false }, yaxis: { ...axisTitle("layer"), dtick: z.length > 12 ? 5 : 1, showgrid: false } });
}
// Sorted values over the share of heads: the heads of unrelated models have ranks in common, and nothing else.
function drawRanks() {
  const id = by("shared-metric").value;
  const line = (values, name, i, dash) => {
    const sorted = values.flat().filter(isNumber).sort((x, y) => x - y);
    const x = sorted.map((_, k) => (100 * (k + 1)) / sorted.length);
    return { type: "scatter", mode: "lines", x, y: sorted, name: plain(name), line: { color: colour(i), dash, width: dash === "solid" ? 2.5 : 1.5 }, hovertemplate: "%{x:.0f} % of heads: at most %{y:.4g}<extra>%{fullData.name}</extra>" };
  };
  const traces = all.models.flatMap((one, i) => {
    const random = one.model.weights === "random" ? null : metricOf(one, id).values.random;
    return [line(own(one, id), one.model.name, i, "solid"), ...(random ? [line(random, `${one.model.name}, one random control`, i, "dash")] : [])];
  });
  draw("ranks", traces, { xaxis: { ...axisTitle("share of heads (%)"), range: [0, 100] }, yaxis: axisTitle(plain(metricOf(all.models[0], id).title)), legend: LEGEND, margin: { l: 52, r: 12, t: 60, b: 44 } });
}
// A fine-tuned model against its base, or why heads cannot be matched; returns the charts it made.
function startPair(pair, i) {
  const place = make(by("pairs"), "div", null, { class: "pair" });
  make(place, "h4", `${pair.model} against ${pair.first}`);
  if (pair.why) {
    make(place, "p", `Heads are not matched one by one: ${pair.why}. Compare them by rank.`, { class: "note" });
    return [];
  }
  make(place, "p", null, { id: `pair-note-${i}`, class: "note", "aria-live": "polite" });
  const grid = make(place, "div", null, { class: "grid two" });
  make(grid, "div", null, { id: `pair-${i}`, class: "chart", role: "img", "aria-label": `Heads of ${pair.model} against those of ${pair.first}` });
  make(grid, "div", null, { id: `pair-table-${i}`, class: "scroll", tabindex: "0", role: "region", "aria-label": `Heads of ${pair.model} that changed most` });
  if (pair.labels) {
    const { names, counts } = pair.labels;
    const moved = counts.flat().reduce((x, y) => x + y, 0) - names.reduce((sum, _, k) => sum + counts[k][k], 0);
    make(place, "p", `Labels: ${plural(moved, "head")} with another label. Rows are labels in ${pair.first}, columns in ${pair.model}.`);
    table(make(place, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Labels before and after" }),
      ["before \\ after", ...names], names.map((name, k) => [name, ...counts[k].map(String)]));
  }
  chart(`pair-${i}`, () => drawPair(pair, i));
  writePair(pair, i);
  return [`pair-${i}`];
}
function writePair(pair, i) {
  if (pair.why) return;
  const found = pair.metrics[by("shared-metric").value];
  by(`pair-note-${i}`).textContent = found
    ? `Correlation over ${plural(found.heads, "head")}: ${fixed(found.correlation)}. The table has the heads that changed most; their intervals are 95 % over documents and do not account for the choice of the largest changes.`
    : "This metric was not measured for both.";
  const rows = (found ? found.changed : []).map((one) => [`L${one.layer}H${one.head}`, show(one.before), show(one.after), withInterval(one.change), one.over]);
  table(by(`pair-table-${i}`), ["head", "before", "after", "change", "interval"], rows);
}
function drawPair(pair, i) {
  const id = by("shared-metric").value;
  const [first, second] = [pair.first, pair.model].map((name) => all.models.find((one) => one.model.name === name));
  const [before, after] = [own(first, id), own(second, id)];
  const points = before.flatMap((row, l) => (row || []).map((x, h) => ({ x, y: after[l]?.[h], l, h }))).filter((point) => isNumber(point.x) && isNumber(point.y));
  const ends = points.flatMap((point) => [point.x, point.y]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const trace = {
    type: "scatter", mode: "markers", x: points.map((point) => point.x), y: points.map((point) => point.y),
    text: points.map((point) => `L${first.model.layers[point.l]}H${point.h}: ${show(point.x)} → ${show(point.y)}`), hoverinfo: "text",
    marker: { size: 7, opacity: 0.75, color: points.map((point) => first.model.layers[point.l]), colorscale: "Viridis", colorbar: { thickness: 10, title: { text: "layer" } } },
  };
  const shapes = points.length ? [{ type: "line", x0: low, y0: low, x1: high, y1: high, line: { color: isDark() ? "#9a9aa5" : "#77777f", width: 1, dash: "dot" } }] : [];
  draw(`pair-${i}`, [trace], { xaxis: axisTitle(plain(first.model.name)), yaxis: axisTitle(plain(second.model.name)), shapes });
}
function drawSharedPlane(i) {
  const one = all.models[i];
  const deepest = Math.max(...all.models.map((each) => Math.max(...each.model.layers)));
  const trace = swapTrace(one, (l) => one.model.layers[l], "Viridis", { cmin: 0, cmax: deepest || 1, colorbar: { thickness: 10, title: { text: "layer" } } });
  draw(`plane-${i}`, [trace], { xaxis: { ...axisTitle("positional score"), ...UNIT }, yaxis: { ...axisTitle("symbolic score"), ...UNIT } });
}
