// 4. Controlled distance, frequencies, perturbation and length.
function writeDistance() {
  by("distance-part").hidden = !data.distance;
  if (data.distance) by("distance-note").textContent = `On ${sizeOf("distance")}.`;
}

function writeBands() {
  const bands = data.bands;
  by("bands-part").hidden = !bands;
  if (!bands) return;
  by("band-note").textContent =
    `On ${plural(bands.documents, "document")} of ${bands.tokens} tokens. Planes are cut into bands of equal size by speed, band 1 the fastest. ` +
    "Left: mean scores of single planes, each taken as the whole head. Right: increase of the loss when a band is masked " +
    "out of every head, or when only that band is kept; dotted lines are for equally many planes chosen at random. Bars are 95 % over documents.";
  const names = modelCharts()["band-scores"].data[0].customdata;
  const rows = names.map((band, b) => [band, ...["positional", "symbolic", "without", "only"].map((name) => withInterval(bands[name][b]))]);
  table(by("band-table").querySelector("div"), ["band", "positional", "symbolic", "loss increase without it", "loss increase with it alone"], rows);
}
function writePerturbation() {
  const perturbation = data.perturbation;
  by("perturbation-part").hidden = !perturbation;
  if (!perturbation) return;
  by("perturb-note").textContent =
    `On ${plural(perturbation.documents, "document")} of ${perturbation.tokens} tokens, one draw for each rate; the loss of the original text is ${withInterval(perturbation.loss)} nats. ` +
    "A share of the words is shuffled, or a share of the tokens gets positions that are off by up to 8. " +
    "Left: all targets, including perturbed text, which is harder to predict in itself. Right: only targets that were not changed, each " +
    "compared with its own loss in the original text. Bands are 95 % over documents.";
  const rows = perturbation.kinds.flatMap((kind) => kind.rates.map((rate, i) => [`${kind.title}, ${rate} %`, withInterval(kind.all[i]), withInterval(kind.untouched[i])]));
  table(by("perturb-table").querySelector("div"), ["perturbation", "loss increase", "on unchanged targets"], rows);
}

function writeLengths() {
  const lengths = data.lengths;
  by("length-part").hidden = !lengths;
  if (!lengths) return;
  const { tokens, edge } = lengths;
  by("length-note").textContent =
    `On ${plural(lengths.documents, "document")} of ${tokens} tokens. ` +
    `The model was trained on ${edge} positions, which the line marks; the text is longer. Each length method is a rule for longer texts. ` +
    "Left: loss by position, which also depends on the text. Right: difference to the unmodified model on the same tokens, document by document. Bands are 95 % over documents.";
  const rows = lengths.methods.map((method) => [method.name, withInterval(method.beyond), withInterval(method.beyond_cost), withInterval(method.found), method.rule]);
  table(by("length-table").querySelector("div"), ["method", `loss after token ${edge}`, "more than none", `nats gained on repeats from more than ${edge} tokens before`, "rule"], rows);
}

function writeCurves() {
  by("curves").hidden = !(data.distance || data.bands || data.perturbation || data.lengths);
  for (const name of ["scatter", "distance", "bands", "perturbation", "length"]) by(`${name}-caption`).textContent = data.captions[name] ?? "";
  writeDistance();
  writeBands();
  writePerturbation();
  writeLengths();
}
const CURVES = ["distance", "drift", "band-scores", "band-losses", "perturb-all", "perturb-untouched", "length-loss", "length-cost"];
function startCurves() {
  for (const id of CURVES) chart(id, () => modelCharts()[id] && draw(id, modelCharts()[id]));
}
