// Several models side by side: numbers with differences, maps on one colour scale, heads by rank, and head by head.
const sharedMetrics = () => {
  const everywhere = (id) => all.models.every((model) => model.metrics.some((metric) => metric.id === id));
  return all.models[0].metrics.filter((metric) => everywhere(metric.id));
};
const metricOf = (model, id) => model.metrics.find((metric) => metric.id === id);
const own = (model, id) => metricOf(model, id).values[model.model.weights] || [];
const isNumber = (x) => x !== null && x !== undefined;
function gridOf(model, values) {
  const most = Math.max(...model.model.heads);
  return model.model.layers.map((_, l) => Array.from({ length: most }, (_, h) => (values[l] ? values[l][h] ?? null : null)));
}
function writeComparison() {
  by("comparison").hidden = false;
  by("which").hidden = false;
  fill(by("model"), all.models.map((model, i) => [i, model.model.name]));
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
  const drawn = (metrics.length ? all.models : []).map((model, i) => {
    const figure = make(by("maps"), "figure");
    make(figure, "div", null, { id: `map-${i}`, class: "chart", role: "img", "aria-label": `Map of ${model.model.name}` });
    make(figure, "figcaption", model.model.name);
    chart(`map-${i}`, () => drawSharedMap(i));
    return `map-${i}`;
  });
  if (metrics.length) {
    writeReading();
    chart("ranks", drawRanks);
    drawn.push("ranks", ...pairs.flatMap((pair, i) => startPair(pair, i)));
  }
  all.models.forEach((model, i) => {
    if (!model.swaps) return;
    const figure = make(by("planes-of-all"), "figure");
    make(figure, "div", null, { id: `plane-${i}`, class: "chart", role: "img", "aria-label": `Positional and symbolic scores of ${model.model.name}` });
    make(figure, "figcaption", `${model.model.name}: positional and symbolic scores, coloured by layer`);
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
  return spanOf(all.models.flatMap((model) => own(model, id).flat()).filter(isNumber));
}
function drawSharedMap(i) {
  const id = by("shared-metric").value;
  draw(`map-${i}`, mapChart(i, metricOf(all.models[i], id), all.models[i].model.weights, sharedSpan(id)));
}
// Two lines for each model: its own heads, and those of its random control where that was measured.
function drawRanks() {
  const id = by("shared-metric").value;
  const { data: lines, layout } = CHARTS.ranks;
  const traces = lines.flatMap((line, k) => {
    const model = all.models[Math.floor(k / 2)];
    const weights = k % 2 ? "random" : model.model.weights;
    if (k % 2 && (model.model.weights === "random" || !metricOf(model, id).values.random)) return [];
    const y = defined(metricOf(model, id).values[weights]).sort((p, q) => p - q);
    return [{ ...line, x: y.map((_, rank) => (100 * (rank + 1)) / y.length), y }];
  });
  draw("ranks", { data: traces, layout: { ...layout, yaxis: { title: { text: plain(metricOf(all.models[0], id).title) } } } });
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
  const comparison = pair.metrics[by("shared-metric").value];
  by(`pair-note-${i}`).textContent = comparison
    ? `Correlation over ${plural(comparison.heads, "head")}: ${fixed(comparison.correlation)}. The table has the heads that changed most; their intervals are 95 % over documents and do not account for the choice of the largest changes.`
    : "This metric was not measured for both.";
  const rows = (comparison ? comparison.changed : []).map((head) => [`L${head.layer}H${head.head}`, show(head.before), show(head.after), withInterval(head.change), head.over]);
  table(by(`pair-table-${i}`), ["head", "before", "after", "change", "interval"], rows);
}
function drawPair(pair, i) {
  const id = by("shared-metric").value;
  const [first, second] = [pair.first, pair.model].map((name) => all.models.find((model) => model.model.name === name));
  const [before, after] = [own(first, id), own(second, id)];
  const points = before.flatMap((row, l) => (row || []).map((x, h) => ({ x, y: after[l]?.[h], l, h }))).filter((point) => isNumber(point.x) && isNumber(point.y));
  const ends = points.flatMap((point) => [point.x, point.y]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const { data: [marks], layout } = CHARTS.pairs[i];
  const trace = {
    ...marks, x: points.map((point) => point.x), y: points.map((point) => point.y),
    text: points.map((point) => `L${first.model.layers[point.l]}H${point.h}: ${show(point.x)} → ${show(point.y)}`),
    marker: { ...marks.marker, color: points.map((point) => first.model.layers[point.l]) },
  };
  const shapes = points.length ? layout.shapes.map((line) => ({ ...line, x0: low, y0: low, x1: high, y1: high })) : [];
  draw(`pair-${i}`, { data: [trace], layout: { ...layout, shapes } });
}
function drawSharedPlane(i) {
  const deepest = Math.max(...all.models.map((each) => Math.max(...each.model.layers)));
  const { data: [trace], layout } = planeChart(i);
  draw(`plane-${i}`, { data: [{ ...trace, marker: { ...trace.marker, cmin: 0, cmax: deepest || 1 } }], layout });
}
