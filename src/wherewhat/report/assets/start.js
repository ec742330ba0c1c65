// Selection of model and metric, and the start of the page.
function write() {
  writeFindings();
  writeModel();
  fill(by("metric"), data.metrics.map((metric, i) => [i, `${metric.title} (${metric.measurement})`]));
  by("metric").value = chosen.metric;
  fill(by("layer"), data.model.layers.map((layer, l) => [l, layer]));
  fillHeads();
  writeMetric();
  writePanel();
  writePlane();
  writeCurves();
  writeOthers();
  writeMethod();
}
function chooseModel(i) {
  const metric = data.metrics[chosen.metric];
  chosen.model = i;
  data = all.models[i];
  chosen.metric = Math.max(0, data.metrics.findIndex((one) => metric && one.id === metric.id));
  chosen.weights = data.model.weights;
  chosen.layer = Math.min(chosen.layer, data.model.layers.length - 1);
  chosen.head = Math.min(chosen.head, data.model.heads[chosen.layer] - 1);
  write();
  redrawAll();
}

setDark(matchMedia("(prefers-color-scheme: dark)").matches);
write();
chart("map", drawMap);
startPanel();
chart("scatter", drawScatter);
startCurves();
startLearning();
if (all.models.length > 1) writeComparison();
listenToMap();
by("colour").addEventListener("change", () => redraw("scatter"));
by("theme").addEventListener("click", () => {
  setDark(!isDark());
  redrawAll();
});
document.documentElement.dataset.ready = "true";
