// Selection of model and metric, and the start of the page.
function write() {
  by("model").value = chosen.model;
  writeOverview();
  writeFindings();
  writeModel();
  fillMetrics();
  fill(by("layer"), data.model.layers.map((layer, l) => [l, layer]));
  fillHeads();
  writeMetric();
  writeHeads();
  writePanel();
  writeQuestions();
  writePlane();
  writeCurves();
  writeClaims();
  writeOthers();
  writeMethod();
  writeTerms();
  writeUnfinished();
  writeContents();
}
function writeContents() {
  by("contents").replaceChildren();
  for (const section of document.querySelectorAll("main > section:not([hidden])")) {
    const entry = make(by("contents"), "li");
    const { dataset, textContent } = section.querySelector("h2");
    make(entry, "a", dataset.short ?? textContent, { href: `#${section.id}` });
    if (section.id === "others") listOthers(entry);
  }
}
// On a narrow screen sections begin folded, so that the page is short; on a wide one, and in print, all are open.
const isNarrow = matchMedia("(max-width: 40rem)");
function foldSections() {
  const folds = [...document.querySelectorAll("details.fold")];
  const set = (open) => folds.forEach((fold) => (fold.open = open));
  set(!isNarrow.matches);
  isNarrow.addEventListener("change", () => set(!isNarrow.matches));
}
function setModel(i) {
  const metric = data.metrics[chosen.metric];
  chosen.model = i;
  data = all.models[i];
  chosen.metric = Math.max(0, data.metrics.findIndex(({ id }) => metric && id === metric.id));
  chosen.weights = data.model.weights;
  chosen.document = Math.min(chosen.document, data.texts.length - 1);
  [chosen.layer, chosen.head] = tellingHead();
  chosen.beside = null;
}
function chooseModel(i) {
  setModel(i);
  write();
  redrawAll();
}

[chosen.layer, chosen.head] = tellingHead();
readView();
setTheme();
startUnfinished();
if (all.models.length > 1) writeComparison();
write();
chart("map", drawMap, { numbers: numbersOfMap });
make(by("map").parentNode, "div", null, { id: "chosen-head", class: "marked", hidden: "" });
chart("range", drawRange, { numbers: numbersOfRange });
startPanel();
startThumbnails();
startHero();
chart("scatter", drawScatter);
startCurves();
startLearning();
listenToMap();
startHeads();
by("colour").addEventListener("change", () => redraw("scatter"));
listenToView();
foldSections();
showSection();
document.documentElement.dataset.ready = "true";
