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
  by("distance-part").hidden = !data.distance;
  if (data.distance) by("distance-note").textContent = `On ${sizeOf("distance")}.`;
}

function writeBands() {
  const found = data.bands;
  by("bands-part").hidden = !found;
  if (!found) return;
  by("band-note").textContent =
    `On ${plural(found.documents, "document")} of ${found.tokens} tokens. Planes are cut into bands of equal size by speed, band 1 the fastest. ` +
    "Left: mean scores of single planes, each taken as the whole head. Right: increase of the loss when a band is masked " +
    "out of every head, or when only that band is kept; dotted lines are for equally many planes chosen at random. Bars are 95 % over documents.";
  const rows = found.turns.map((_, b) => [bandName(b), ...["positional", "symbolic", "without", "only"].map((name) => withInterval(found[name][b]))]);
  table(by("band-table").querySelector("div"), ["band", "positional", "symbolic", "loss increase without it", "loss increase with it alone"], rows);
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
  draw("band-losses", bars([["without", "without the band"], ["only", "with it alone"]], data.bands, x), bandLayout("loss increase (nats)", { shapes }));
}

function writePerturbation() {
  const found = data.perturbation;
  by("perturbation-part").hidden = !found;
  if (!found) return;
  by("perturb-note").textContent =
    `On ${plural(found.documents, "document")} of ${found.tokens} tokens, one draw for each rate; the loss of the original text is ${withInterval(found.loss)} nats. ` +
    "A share of the words is shuffled, or a share of the tokens gets positions that are off by up to 8. " +
    "Left: all targets, including perturbed text, which is harder to predict in itself. Right: only targets that were not changed, each " +
    "compared with its own loss in the original text. Bands are 95 % over documents.";
  const rows = found.kinds.flatMap((kind) => kind.rates.map((rate, i) => [`${kind.title}, ${rate} %`, withInterval(kind.all[i]), withInterval(kind.untouched[i])]));
  table(by("perturb-table").querySelector("div"), ["perturbation", "loss increase", "on unchanged targets"], rows);
}
function drawPerturbation(id, which) {
  if (!data.perturbation) return;
  const traces = data.perturbation.kinds.flatMap((kind, i) => lineWithBand(kind.rates.map((rate) => `${rate} %`), kind[which], kind.title, i));
  draw(id, traces, { xaxis: { ...axisTitle("share perturbed"), type: "category" }, yaxis: { ...axisTitle("loss increase (nats)"), rangemode: "tozero" }, legend: LEGEND, margin: { l: 52, r: 12, t: 40, b: 44 } });
}

function writeLengths() {
  const found = data.lengths;
  by("length-part").hidden = !found;
  if (!found) return;
  const { tokens, edge } = found;
  by("length-note").textContent =
    `On ${plural(found.documents, "document")} of ${tokens} tokens. ` +
    `The model was trained on ${edge} positions, which the line marks; the text is longer. Each length method is a rule for longer texts. ` +
    "Left: loss by position, which also depends on the text. Right: difference to the unmodified model on the same tokens, document by document. Bands are 95 % over documents.";
  const rows = found.methods.map((method) => [method.name, withInterval(method.beyond), withInterval(method.beyond_cost), withInterval(method.found), method.rule]);
  table(by("length-table").querySelector("div"), ["method", `loss after token ${edge}`, "more than none", `nats gained on repeats from more than ${edge} tokens before`, "rule"], rows);
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
  by("curves").hidden = !(data.distance || data.bands || data.perturbation || data.lengths);
  for (const name of ["scatter", "distance", "bands", "perturbation", "length"]) by(`${name}-caption`).textContent = data.captions[name] ?? "";
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
  chart("length-cost", () => drawLengths("length-cost", "cost", "difference to unmodified (nats)"));
}
