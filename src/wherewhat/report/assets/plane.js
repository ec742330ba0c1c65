// 3. All heads by positional and symbolic score.
const planeChart = (model) => CHARTS.models[model].scatter[chosen.keys === "all" ? 1 : 0];
const sinkHeads = () => (data.swaps ? data.model.layers.flatMap((_, l) => Array.from({ length: data.model.heads[l] }, (_, h) => [l, h])).filter(([l, h]) => labelIn(data.swaps, l, h) === "sink") : []);
const sinkMarks = () => (chosen.keys !== "all" && sinkHeads().length ? "Diamonds are sink heads." : "");
// Which keys the scores are over; the label of sink heads where sinks are no class of their own.
function keysOfScores() {
  if (chosen.keys !== "all") return ["Scores are over the keys after the sink.", sinkMarks()].filter(Boolean).join(" ");
  const sinks = sinkHeads();
  const symbolic = sinks.filter(([l, h]) => labelIn(data.swaps.all_keys, l, h) === "symbolic").length;
  return sinks.length ? `Scores are over all keys: of ${plural(sinks.length, "sink head")}, ${symbolic} ${symbolic === 1 ? "is" : "are"} symbolic by them.` : "Scores are over all keys.";
}
function writePlane() {
  by("scatter").hidden = !data.swaps;
  by("plane-note").textContent = data.swaps
    ? "Bottom right: pure positional. Top left: pure symbolic. Top right: uniform attention. Click a head to select it. "
      + `${keysOfScores()} On ${sizeOf("heads")}.`
    : "Not measured for this model.";
}
function drawScatter() {
  if (!data.swaps) return;
  const { data: [trace], layout } = planeChart(chosen.model);
  const r = data.metrics.find((metric) => metric.id === "r");
  const byR = by("colour").value === "r" && r && { color: trace.customdata.map(([l, h]) => ownValue(r, l, h)), colorscale: "Cividis", colorbar: { ...trace.marker.colorbar, title: { text: "r" } } };
  draw("scatter", { data: [{ ...trace, marker: { ...trace.marker, ...byR } }], layout });
  const place = by("scatter");
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", (event) => {
    choose(...event.points[0].customdata);
    by(isWide.matches ? "heads" : "panel").scrollIntoView();
  });
}
