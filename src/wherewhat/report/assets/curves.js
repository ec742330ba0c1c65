// 4. Controlled distance, frequencies, perturbation and length.
function drawQuartiles(id, names, title) {
  const { distances, curves } = data.distance;
  const traces = names.filter((name) => curves[name]).flatMap((name, i) => {
    const { low, mid, high } = curves[name];
    return lineWithBand(distances.map(String), mid.map((mean, d) => ({ mean, low: low[d], high: high[d] })), curves[name].title, i);
  });
  draw(id, traces, { xaxis: { ...axisTitle("dummy distance (tokens)"), type: "category" }, yaxis: axisTitle(title), legend: LEGEND, margin: { l: 52, r: 12, t: 40, b: 44 } });
}
function writeDistance() {
  by("distance").hidden = by("drift").hidden = !data.distance;
  by("distance-note").textContent = data.distance ? "" : "Not measured for this model.";
}

function writeBands() {
  const found = data.bands;
  for (const id of ["band-scores", "band-losses", "band-table"]) by(id).hidden = !found;
  if (!found) return void (by("band-note").textContent = "Not measured for this model.");
  by("band-note").textContent =
    `On ${plural(found.documents, "document")} of ${found.tokens} tokens. Planes are cut into bands of equal size by speed, band 1 the fastest. ` +
    "Left: the mean scores of single planes, each as if it were the whole head. Right: how much the loss rises when a band is masked " +
    "out of every head, or when only that band is left; the dotted lines are as many planes chosen at random. Bars are 95 % over documents.";
  const rows = found.turns.map((_, b) => [bandName(b), ...["positional", "symbolic", "without", "only"].map((name) => withInterval(found[name][b]))]);
  table(by("band-table").querySelector("div"), ["band", "positional", "symbolic", "loss rise without it", "loss rise with it alone"], rows);
}
const short = (x) => (x === null ? "∞" : x >= 1e4 ? x.toExponential(0) : String(Math.round(x)));
const bandName = (b) => {
  const [fast, slow] = data.bands.turns[b];
  return `${b + 1} (a turn in ${short(fast)} to ${short(slow)} tokens)`;
};
function bars(names, found, x) {
  return names.map(([key, name], i) => {
    const values = found[key];
    const high = values.map((v) => (v && v.high !== null ? v.high - v.mean : 0));
    const low = values.map((v) => (v && v.low !== null ? v.mean - v.low : 0));
    return {
      type: "bar", name, x, y: values.map((v) => v && v.mean), marker: { color: colour(i), pattern: { shape: i ? "/" : "" } },
      error_y: { type: "data", symmetric: false, array: high, arrayminus: low, color: isDark() ? "#ececf1" : "#1b1b1f" },
      text: values.map((v, b) => `band ${bandName(b)}<br>${name}: ${withInterval(v)}`), textposition: "none", hoverinfo: "text",
    };
  });
}
const bandLayout = (title, extra = {}) => ({ barmode: "group", legend: LEGEND, margin: { l: 52, r: 12, t: 40, b: 44 }, xaxis: { ...axisTitle("band, fast to slow"), type: "category" }, yaxis: axisTitle(title), ...extra });
function drawBandScores() {
  if (!data.bands) return;
  const x = data.bands.turns.map((_, b) => String(b + 1));
  draw("band-scores", bars([["positional", "positional"], ["symbolic", "symbolic"]], data.bands, x), bandLayout("score of single planes"));
}
function drawBandLosses() {
  if (!data.bands) return;
  const x = data.bands.turns.map((_, b) => String(b + 1));
  const level = (value, i) => (value ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: value.mean, y1: value.mean, line: { color: colour(i), width: 2, dash: "dot" } }] : []);
  const shapes = [...level(data.bands.without_random, 0), ...level(data.bands.only_random, 1)];
  draw("band-losses", bars([["without", "without the band"], ["only", "with it alone"]], data.bands, x), bandLayout("rise of the loss (nats)", { shapes }));
}

function writePerturbation() {
  const found = data.perturbation;
  for (const id of ["perturb-all", "perturb-untouched", "perturb-table"]) by(id).hidden = !found;
  if (!found) return void (by("perturb-note").textContent = "Not measured for this model.");
  by("perturb-note").textContent =
    `On ${plural(found.documents, "document")} of ${found.tokens} tokens, one draw for each rate; the loss of the untouched text is ${withInterval(found.loss)} nats. ` +
    "A share of the words change places at random, or a share of the tokens keep their place in the text but are given positions up to 8 off. " +
    "Left: all targets, disturbed text among them, which is harder for anybody. Right: only targets that were themselves not touched, each " +
    "against itself: what the rest of the text feels. Bands are 95 % over documents.";
  const rows = found.kinds.flatMap((kind) => kind.rates.map((rate, i) => [`${kind.title}, ${rate} %`, withInterval(kind.all[i]), withInterval(kind.untouched[i])]));
  table(by("perturb-table").querySelector("div"), ["disturbed", "rise of the loss", "on untouched targets"], rows);
}
function drawPerturbation(id, which) {
  if (!data.perturbation) return;
  const traces = data.perturbation.kinds.flatMap((kind, i) => lineWithBand(kind.rates.map((rate) => `${rate} %`), kind[which], kind.title, i));
  draw(id, traces, { xaxis: { ...axisTitle("share disturbed"), type: "category" }, yaxis: { ...axisTitle("rise of the loss (nats)"), rangemode: "tozero" }, legend: LEGEND, margin: { l: 52, r: 12, t: 40, b: 44 } });
}

function writeLengths() {
  const found = data.lengths;
  for (const id of ["length-loss", "length-cost", "length-table"]) by(id).hidden = !found;
  if (!found) return void (by("length-note").textContent = "Not measured for this model, or its texts are too short.");
  const { tokens, edge } = found;
  by("length-note").textContent =
    `On ${plural(found.documents, "document")} of ${tokens} tokens. ` +
    (found.beyond
      ? `The model was made for ${edge} positions, and the text goes beyond them: the line marks where. Each method is a rule for what happens there. `
      : `This is within the positions the model was made for; going beyond them takes minutes (wherewhat extend). Instead each method is given a ` +
        `window of ${edge} tokens, a quarter of the text: what a small window costs, with the model itself (none) seeing everything. `) +
    "Left: loss by position, which also follows the text. Right: the same less the untouched model on the same tokens, document by document. Bands are 95 % over documents.";
  const rows = found.methods.map((method) => [method.name, withInterval(method.beyond), withInterval(method.beyond_cost), withInterval(method.found), method.rule]);
  table(by("length-table").querySelector("div"), ["method", `loss after token ${edge}`, "more than none", `nats gained from what is repeated from over ${edge} tokens back`, "rule"], rows);
}
function drawLengths(id, which, title) {
  if (!data.lengths) return;
  const { positions, methods, edge } = data.lengths;
  const traces = methods.flatMap((method, i) => (which === "cost" && method.name === "none" ? [] : lineWithBand(positions, method[which], method.name, i)));
  const ink = isDark() ? "#ececf1" : "#1b1b1f";
  const shapes = edge ? [{ type: "line", x0: edge, x1: edge, yref: "paper", y0: 0, y1: 1, line: { color: ink, width: 1, dash: "dot" } }] : [];
  draw(id, traces, { xaxis: axisTitle("position (tokens)"), yaxis: axisTitle(title), legend: LEGEND, shapes, margin: { l: 52, r: 12, t: 60, b: 44 } });
}

function writeCurves() {
  writeDistance();
  writeBands();
  writePerturbation();
  writeLengths();
}
function startCurves() {
  chart("distance", () => data.distance && drawQuartiles("distance", ["rank_correlation", "rank_correlation_scrambled"], "rank correlation"));
  chart("drift", () => data.distance && drawQuartiles("drift", ["drift", "drift_scrambled"], "drift"));
  chart("band-scores", drawBandScores);
  chart("band-losses", drawBandLosses);
  chart("perturb-all", () => drawPerturbation("perturb-all", "all"));
  chart("perturb-untouched", () => drawPerturbation("perturb-untouched", "untouched"));
  chart("length-loss", () => drawLengths("length-loss", "loss", "loss (nats)"));
  chart("length-cost", () => drawLengths("length-cost", "cost", "more than untouched (nats)"));
}
