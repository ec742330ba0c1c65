// Selection of model and metric, and the start of the page.
function write() {
  by("model").value = chosen.model;
  writeFindings();
  writeModel();
  fill(by("metric"), data.metrics.map((metric, i) => [i, `${metric.title} (${metric.measurement})`]));
  by("metric").value = chosen.metric;
  fill(by("layer"), data.model.layers.map((layer, l) => [l, layer]));
  fillHeads();
  writeMetric();
  writeHeads();
  writePanel();
  writePlane();
  writeCurves();
  writeOthers();
  writeMethod();
}
function setModel(i) {
  const metric = data.metrics[chosen.metric];
  chosen.model = i;
  data = all.models[i];
  chosen.metric = Math.max(0, data.metrics.findIndex((one) => metric && one.id === metric.id));
  chosen.weights = data.model.weights;
  [chosen.layer, chosen.head] = tellingHead();
}
function chooseModel(i) {
  setModel(i);
  write();
  redrawAll();
}

[chosen.layer, chosen.head] = tellingHead();
readView();
setTheme();
if (all.models.length > 1) writeComparison();
write();
chart("map", drawMap);
startPanel();
chart("scatter", drawScatter);
startCurves();
startLearning();
listenToMap();
startHeads();
by("colour").addEventListener("change", () => redraw("scatter"));
by("theme").addEventListener("click", () => {
  chosen.theme = isDark() ? "light" : "dark";
  setTheme();
  redrawAll();
  saveView();
});
addEventListener("hashchange", openView);
showSection();
document.documentElement.dataset.ready = "true";
