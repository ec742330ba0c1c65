// 5. Learning curves of trainings.
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
  by("learning-note").textContent = study().note;
  table(by("learning-table"), study().table.header, study().table.rows);
}
function drawLearning() {
  const { steps, panels } = study();
  const gap = 0.08;
  const height = (1 - gap * (panels.length - 1)) / panels.length;
  const many = steps.length > 30;
  const layout = { xaxis: axisTitle("step"), legend: { orientation: "h", y: -0.1, yanchor: "top" }, margin: { l: 52, r: 12, t: 12, b: 150 } };
  // From the bottom up, so that the axis of steps is below the last panel.
  const traces = [...panels].reverse().map((panel, place) => {
    const suffix = place ? String(place + 1) : "";
    const low = place * (height + gap);
    layout[`yaxis${suffix}`] = { ...axisTitle(panel.title), domain: [low, Math.min(1, low + height)], ...(panel.range ? { range: panel.range } : {}) };
    return panel.series.flatMap((one, i) => {
      const points = one.mean.map((mean, at) => ({ mean, low: one.low ? one.low[at] : null, high: one.high ? one.high[at] : null }));
      const drawn = lineWithBand(steps, points, one.name, i, { yaxis: `y${suffix}`, ...(many || one.shape === "hv" ? { mode: "lines" } : {}) });
      drawn[drawn.length - 1].line.shape = one.shape;
      return drawn;
    });
  });
  draw("dynamics", traces.reverse().flat(), layout);
}
