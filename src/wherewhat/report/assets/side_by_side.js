// Several models side by side: numbers, maps on one colour scale, planes.
const sharedMetrics = () => {
  const everywhere = (id) => all.models.every((one) => one.metrics.some((metric) => metric.id === id));
  return all.models[0].metrics.filter((metric) => everywhere(metric.id));
};
const own = (model, id) => {
  const metric = model.metrics.find((one) => one.id === id);
  return metric.values[model.model.weights] || [];
};
function gridOf(model, values) {
  const most = Math.max(...model.model.heads);
  return model.model.layers.map((_, l) => Array.from({ length: most }, (_, h) => (values[l] ? values[l][h] ?? null : null)));
}
function writeComparison() {
  by("comparison").hidden = false;
  by("which").hidden = false;
  fill(by("model"), all.models.map((one, i) => [i, one.model.name]));
  const titles = [...new Set(all.models.flatMap((one) => one.numbers.map((number) => number.title)))];
  const cell = (one, title) => {
    const number = one.numbers.find((found) => found.title === title);
    return number ? number.values.map((value) => `${fixed(value.mean)} ${value.name}${interval(value)}`).join("; ") : "not measured";
  };
  table(by("side-by-side"), ["", ...all.models.map((one) => one.model.name)], titles.map((title) => [title, ...all.models.map((one) => cell(one, title))]));
  const metrics = sharedMetrics();
  fill(by("shared-metric"), metrics.map((metric) => [metric.id, `${metric.title} (${metric.measurement})`]));
  by("shared").hidden = !metrics.length;
  by("unshared").hidden = metrics.length > 0;
  // Without a metric there would be nothing to draw when the page is printed.
  const maps = (metrics.length ? all.models : []).map((one, i) => {
    const figure = make(by("maps"), "figure");
    make(figure, "div", null, { id: `map-${i}`, class: "chart", role: "img", "aria-label": `Map of ${one.model.name}` });
    make(figure, "figcaption", one.model.name);
    chart(`map-${i}`, () => drawSharedMap(i));
    return `map-${i}`;
  });
  all.models.forEach((one, i) => {
    if (!one.swaps) return;
    const figure = make(by("planes-of-all"), "figure");
    make(figure, "div", null, { id: `plane-${i}`, class: "chart", role: "img", "aria-label": `Positional and symbolic scores of ${one.model.name}` });
    make(figure, "figcaption", `${one.model.name}: positional and symbolic scores, coloured by layer`);
    chart(`plane-${i}`, () => drawSharedPlane(i));
  });
  by("shared-metric").addEventListener("change", () => redraw(...maps));
  by("model").addEventListener("change", (event) => chooseModel(+event.target.value));
}
function sharedSpan(id) {
  const values = all.models.flatMap((one) => own(one, id).flat()).filter((x) => x !== null && x !== undefined);
  return spanOf(values);
}
function drawSharedMap(i) {
  const one = all.models[i];
  const id = by("shared-metric").value;
  const metric = one.metrics.find((found) => found.id === id);
  by("shared-reading").textContent = metric.reading;
  const z = gridOf(one, own(one, id));
  const [zmin, zmax] = sharedSpan(id);
  const text = z.map((row, l) => row.map((x, h) => `layer ${one.model.layers[l]}, head ${h}<br>${plain(metric.title)}: ${show(x)} ${plain(metric.unit)}`));
  const trace = { type: "heatmap", z, x: z[0].map((_, h) => h), y: one.model.layers, zmin, zmax, colorscale: "Viridis", text, hoverinfo: "text", xgap: 1, ygap: 1, colorbar: { thickness: 10 } };
  draw(`map-${i}`, [trace], { xaxis: { ...axisTitle("head"), dtick: z[0].length > 12 ? 4 : 1, showgrid: false }, yaxis: { ...axisTitle("layer"), dtick: z.length > 12 ? 5 : 1, showgrid: false } });
}
function drawSharedPlane(i) {
  const one = all.models[i];
  const deepest = Math.max(...all.models.map((each) => Math.max(...each.model.layers)));
  const trace = swapTrace(one, (l) => one.model.layers[l], "Viridis", { cmin: 0, cmax: deepest || 1, colorbar: { thickness: 10, title: { text: "layer" } } });
  draw(`plane-${i}`, [trace], { xaxis: { ...axisTitle("positional score"), ...UNIT }, yaxis: { ...axisTitle("symbolic score"), ...UNIT } });
}
