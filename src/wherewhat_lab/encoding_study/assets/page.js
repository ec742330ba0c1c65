// Text from files is only ever set through textContent.
const data = stored;
const hidden = new Set();
const fixed = (x, digits = 3) => (x === null || x === undefined ? "none" : x.toFixed(digits));
// A chart without its own legend: the legend at the top applies to all charts.
const plot = (id, { data: traces, layout }) => draw(id, { data: traces.filter((trace) => !hidden.has(trace.legendgroup)), layout });

function drawLength() {
  const method = by("method").value;
  const without = data.encodings.filter((encoding) => !hidden.has(encoding.name) && !encoding.lengths.methods[method]).map((encoding) => encoding.name);
  by("length-note").textContent =
    "Loss by position range of a quarter context, mean over seeds and documents with 95 % intervals over documents. The vertical line is the training context." +
    (without.length ? ` The method does not apply to ${without.join(", ")}.` : "") +
    " Learned positions end with the context; no method extends them.";
  plot("length", CHARTS.length[method]);
}
const drawPerturb = () => plot("perturb", CHARTS.perturb[by("kind").value]);
function drawRelation() {
  const [x, y] = [by("x").value, by("y").value];
  plot("relation", CHARTS.relation[x][y]);
  const correlation = relation(x, y);
  by("relation-note").textContent = correlation.rho === null ? "Too few encodings for a correlation."
    : `Spearman's ρ = ${fixed(correlation.rho, 2)} (95 % ${fixed(correlation.low, 2)} to ${fixed(correlation.high, 2)}, bootstrap over encodings), p = ${fixed(correlation.p, 2)} (permutation test), n = ${correlation.n} encodings, means over seeds. With this few encodings only a nearly perfect order is significant.`;
}
function drawAll() {
  by("legend").querySelectorAll(".swatch").forEach((swatch, i) => (swatch.style.background = coloured(CHARTS.colours[i], "color")));
  for (const id of ["time", "when", "residual"]) plot(id, CHARTS[id]);
  drawLength();
  drawPerturb();
  drawRelation();
}
function choices(id, options, redraw) {
  for (const [value, text] of options) make(by(id), "option", text, { value });
  by(id).addEventListener("change", redraw);
}

const a = data.about;
by("about").textContent =
  `${data.encodings.length} encodings of the same language model of ${(a.parameters / 1e6).toFixed(1)} million parameters on the bytes of ${a.text}: ` +
  `context ${a.context}, ${a.steps.toLocaleString("en")} steps, seeds ${a.seeds.join(", ")}, the same data in the same order, on ${a.device}. ` +
  `Recording took at most ${fixed(100 * (a.recording || 0), 0)} % of the training time.`;
for (const { name } of data.encodings) {
  const label = make(by("legend"), "label");
  const box = make(label, "input", null, { type: "checkbox", checked: "" });
  make(label, "span", null, { class: "swatch", "aria-hidden": "true" });
  make(label, "span", name);
  box.addEventListener("change", () => { if (box.checked) hidden.delete(name); else hidden.add(name); drawAll(); });
}
for (const panel of data.panels) { make(by("readings"), "dt", panel.title); make(by("readings"), "dd", panel.reading); }
choices("method", Object.keys(CHARTS.length).map((name) => [name, name]), drawLength);
choices("kind", Object.entries(data.kinds), drawPerturb);
choices("x", Object.entries(data.additivity), drawRelation);
choices("y", Object.entries(data.tolerance), drawRelation);
table(by("when-table"), ["encoding", ...CHARTS.when.layout.yaxis.categoryarray], CHARTS.events);
const relation = (x, y) => data.relations.find((entry) => entry.x === x && entry.y === y);
const inWords = (correlation) => (correlation.rho === null ? "too few" : `${fixed(correlation.rho, 2)} (${fixed(correlation.low, 2)} to ${fixed(correlation.high, 2)}), p = ${fixed(correlation.p, 2)}, n = ${correlation.n}`);
table(by("relation-table"), ["robustness", ...Object.values(data.additivity)],
  Object.entries(data.tolerance).map(([y, name]) => [name, ...Object.keys(data.additivity).map((x) => inWords(relation(x, y)))]));
by("time").style.height = `${CHARTS.time.layout.height}px`;
writeRuns(data.runs);
startTheme(drawAll);
drawAll();
document.documentElement.dataset.ready = "true";
