// 5. Learning dynamics of multi-hop trainings.
const study = () => all.learning[+by("study").value || 0];
function startLearning() {
  by("learning").hidden = !all.learning.length;
  if (!all.learning.length) return;
  fill(by("study"), all.learning.map((one, i) => [i, one.title]));
  by("study").addEventListener("change", () => {
    writeLearning();
    redraw("dynamics");
  });
  writeLearning();
  chart("dynamics", drawLearning);
}
function writeLearning() {
  const one = study();
  const steps = Object.entries(one.reached).map(([hops, step]) => `${plural(+hops, "hop")} ${step < 0 ? "never" : `at step ${step}`}`);
  by("learning-note").textContent =
    `${plural(one.about.layers, "layer")} of ${plural(one.about.heads, "head")}, evaluated on ${plural(one.about.scored, "held-out sequence")}. ` +
    `Accuracy ${one.level} is reached for ${steps.join(", ")}. Top: accuracy by number of hops, bands 95 % over questions. ` +
    `Middle: mean over heads of positional and symbolic score and of r, bands are quartiles over heads; r of pure noise is ${show(one.r_noise)}. ` +
    `Bottom: number of heads with each label (pure within ${one.gamma}).`;
  const last = one.steps.length - 1;
  const moments = new Set([0, 1, 2, 3, 4].map((quarter) => Math.floor((quarter * last) / 4)));
  const rows = [...moments].map((at) => [
    String(one.steps[at]), ...one.accuracy.map((a) => fixed(a.mean[at])), fixed(one.scores.s_pos.mean[at]), fixed(one.scores.s_sym.mean[at]),
    fixed(one.scores.r.mean[at]), ...one.counts.map((c) => String(c[at])),
  ]);
  table(by("learning-table"), ["step", ...one.hops.map((hops) => `${hops}-hop`), "positional", "symbolic", "r", ...one.labels], rows);
}
function drawLearning() {
  const one = study();
  const points = (curve) => curve.mean.map((mean, i) => ({ mean, low: curve.low[i], high: curve.high[i] }));
  const few = one.steps.length > 30 ? { mode: "lines" } : {};
  const traces = [
    ...one.accuracy.flatMap((curve, i) => lineWithBand(one.steps, points(curve), `${one.hops[i]}-hop accuracy`, i, { yaxis: "y3", ...few })),
    ...[["s_pos", "positional score"], ["s_sym", "symbolic score"], ["r", "r"]].flatMap(([key, name], i) => lineWithBand(one.steps, points(one.scores[key]), name, i, { yaxis: "y2", ...few })),
    ...one.counts.map((counts, i) => ({
      type: "scatter", mode: "lines", name: `${one.labels[i]} heads`, x: one.steps, y: counts, yaxis: "y",
      line: { color: colour(i), dash: DASHES[i % DASHES.length], shape: "hv" },
    })),
  ];
  draw("dynamics", traces, {
    xaxis: axisTitle("step"), legend: { orientation: "h", y: -0.1, yanchor: "top" }, margin: { l: 52, r: 12, t: 12, b: 150 },
    yaxis: { ...axisTitle("heads"), domain: [0, 0.28] },
    yaxis2: { ...axisTitle("score"), domain: [0.36, 0.64], range: [-0.03, 1.03] },
    yaxis3: { ...axisTitle("accuracy"), domain: [0.72, 1], range: [-0.03, 1.03] },
  });
}
