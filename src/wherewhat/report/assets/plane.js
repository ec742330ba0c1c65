// 3. All heads by positional and symbolic score.
const UNIT = { range: [-0.03, 1.03] };
function swapTrace(model, paint, colorscale, extra) {
  const s = swapsOf(model);
  const points = { x: [], y: [], text: [], colour: [], symbol: [], at: [] };
  model.model.layers.forEach((layer, l) => (s.s_pos[l] || []).forEach((pos, h) => {
    if (pos === null) return;
    points.x.push(pos);
    points.y.push(s.s_sym[l][h]);
    const name = labelIn(s, l, h);
    points.colour.push(paint(l, h));
    points.symbol.push(name === "sink" ? "diamond-open" : "circle");
    points.at.push([l, h]);
    points.text.push(`layer ${layer}, head ${h}: ${name}<br>positional ${show(pos)}, symbolic ${show(s.s_sym[l][h])}`);
  }));
  return { type: "scatter", mode: "markers", x: points.x, y: points.y, text: points.text, customdata: points.at, hoverinfo: "text", marker: { size: 8, color: points.colour, symbol: points.symbol, colorscale, line: { width: 0.5, color: "#888" }, ...extra } };
}
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
  const r = data.metrics.find((metric) => metric.id === "r");
  const byR = by("colour").value === "r" && r;
  const paint = byR ? (l, h) => (r.values[data.model.weights][l] || [])[h] : (l) => data.model.layers[l];
  const trace = swapTrace(data, paint, byR ? "Cividis" : "Viridis", { colorbar: { thickness: 12, title: { text: byR ? "r" : "layer" } } });
  draw("scatter", [trace], { xaxis: { ...axisTitle("positional score"), ...UNIT }, yaxis: { ...axisTitle("symbolic score"), ...UNIT } });
  const place = by("scatter");
  place.removeAllListeners("plotly_click");
  place.on("plotly_click", (event) => {
    choose(...event.points[0].customdata);
    by(isWide.matches ? "heads" : "panel").scrollIntoView();
  });
}
