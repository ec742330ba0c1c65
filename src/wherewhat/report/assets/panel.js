// The panel of one head.
const PANEL = ["true", "fitted", "residual", "curve", "planes", "place"];
const record = () => data.records[chosen.layer][chosen.head];
function square(values, rows) {
  const z = Array.from({ length: rows }, () => new Array(rows).fill(null));
  let at = 0;
  for (let i = 0; i < rows; i++) for (let j = 0; j <= i; j++) z[i][j] = values[at++];
  return z;
}
// True logits, their additive fit (distance + query + key) and the residual.
function logits() {
  const { map, a, b, c } = record();
  const truth = unpack(map);
  const rows = Math.floor(Math.sqrt(2 * truth.length));
  const real = square(truth, rows);
  if (!a) return { real };
  const [where, query, key] = [unpack(a), unpack(b), unpack(c)];
  const fit = real.map((row, i) => row.map((x, j) => (x === null || i - j >= where.length ? null : where[i - j] + query[i] + key[j])));
  const rest = real.map((row, i) => row.map((x, j) => (fit[i][j] === null ? null : x - fit[i][j])));
  return { real, fit, rest };
}
function drawLogits(id, z, extra) {
  if (!z) return void Plotly.purge(by(id));
  const pieces = data.text.tokens;
  const text = z.map((row, i) => row.map((x, j) => (x === null ? "" : `${plain(JSON.stringify(pieces[i]))} → ${plain(JSON.stringify(pieces[j]))}<br>distance ${i - j}: ${x.toFixed(2)}`)));
  draw(id, [{ type: "heatmap", z, text, hoverinfo: "text", colorbar: { thickness: 8 }, ...extra }], {
    yaxis: { autorange: "reversed", showgrid: false }, xaxis: { showgrid: false }, margin: { l: 30, r: 8, t: 8, b: 28 },
  });
}
const sameScale = () => ({ zmin: record().map.lo, zmax: record().map.hi, colorscale: "Viridis" });
const aroundZero = () => {
  const reach = (record().map.hi - record().map.lo) / 2 || 1;
  return { zmin: -reach, zmax: reach, colorscale: [[0, "#b35806"], [0.5, "#f7f7f7"], [1, "#2166ac"]] };
};
function drawCurve() {
  if (!record().a) return void Plotly.purge(by("curve"));
  const a = unpack(record().a);
  draw("curve", [{ type: "scatter", mode: "lines", x: a.map((_, d) => d), y: a, line: { color: colour(0) }, hovertemplate: "distance %{x}: %{y:.3f}<extra></extra>" }], {
    xaxis: axisTitle("distance (tokens)"), yaxis: axisTitle("a"),
  });
}
function writeText() {
  const place = document.createDocumentFragment();
  const c = record().c ? unpack(record().c).map((x) => x ?? 0) : [];
  const most = Math.max(...c.map(Math.abs), 0) || 1;
  data.text.tokens.slice(0, c.length).forEach((piece, j) => {
    const share = Math.min(1, Math.abs(c[j]) / most);
    const token = make(place, "span", piece, { title: `c = ${c[j].toFixed(3)}` });
    token.style.backgroundColor = c[j] > 0 ? `rgba(86, 160, 233, ${share})` : `rgba(230, 159, 0, ${share})`;
  });
  by("text").replaceChildren(place);
}
function drawPlanes() {
  const packed = record();
  if (!packed.use) return void Plotly.purge(by("planes"));
  const [use, share, pos, sym] = ["use", "share", "plane_pos", "plane_sym"].map((name) => packed[name] && unpack(packed[name]));
  const turns = data.turns[chosen.layer];
  const text = use.map((x, p) => [
    `plane ${p + 1}: ${x === null ? "undefined" : x.toPrecision(3)}`,
    turns && turns[p] ? `one turn in ${(1 / turns[p]).toPrecision(3)} tokens` : "",
    share ? `share of variance ${(share[p] ?? 0).toPrecision(2)}` : "",
    pos && pos[p] !== null ? `alone: positional ${pos[p].toFixed(2)}, symbolic ${sym[p].toFixed(2)}` : "",
  ].filter(Boolean).join("<br>"));
  draw("planes", [{ type: "barpolar", r: use, theta: use.map((_, p) => String(p + 1)), text, hoverinfo: "text", marker: { color: use.map((_, p) => p), colorscale: "Cividis" } }], {
    margin: { l: 30, r: 30, t: 24, b: 24 },
    polar: { angularaxis: { type: "category", direction: "clockwise", nticks: 8 }, radialaxis: { angle: 90, tickangle: 90, nticks: 3 } },
  });
}
const scoreOf = (name) => data.swaps[name][chosen.layer][chosen.head];
const isScored = () => Boolean(data.swaps && data.swaps.s_pos[chosen.layer] && scoreOf("s_pos") !== null);
function label() {
  if (!isScored()) return "Its positional and symbolic scores were not measured.";
  const { labels, gamma } = data.swaps;
  const [name, low, high] = [labels[scoreOf("label")] || "undefined", gamma, +(1 - gamma).toFixed(4)];
  const why = {
    positional: `its positional score is at least ${high} and its symbolic score at most ${low}`,
    symbolic: `its symbolic score is at least ${high} and its positional score at most ${low}`,
    uniform: `both scores are at least ${high}: its attention is uniform`,
    mixed: `neither score is at least ${high} with the other at most ${low}`,
  }[name];
  const reach = (which) => (scoreOf(`${which}_low`) === null ? "" : ` (${show(scoreOf(`${which}_low`))} to ${show(scoreOf(`${which}_high`))})`);
  const score = (which) => `${show(scoreOf(which))}${reach(which)}`;
  return `Label: ${name}${why ? `, because ${why}` : ""}. Positional ${score("s_pos")}, symbolic ${score("s_sym")}.`;
}
function drawPlace() {
  if (!isScored()) return void Plotly.purge(by("place"));
  const others = swapTrace(data, () => "#999999", undefined, { size: 5, opacity: 0.5 });
  // One query of one document has no interval.
  const reach = (name) => ({ visible: scoreOf(`${name}_low`) !== null, type: "data", symmetric: false, array: [scoreOf(`${name}_high`) - scoreOf(name)], arrayminus: [scoreOf(name) - scoreOf(`${name}_low`)], color: "#d6277b" });
  const this_ = {
    type: "scatter", mode: "markers", x: [scoreOf("s_pos")], y: [scoreOf("s_sym")], marker: { size: 14, color: "#d6277b", symbol: "diamond" },
    hoverinfo: "skip", error_x: reach("s_pos"), error_y: reach("s_sym"),
  };
  draw("place", [others, this_], { showlegend: false, xaxis: { ...axisTitle("positional"), ...UNIT }, yaxis: { ...axisTitle("symbolic"), ...UNIT } });
}
function writePanel() {
  by("h-panel").textContent = `Layer ${data.model.layers[chosen.layer]}, head ${chosen.head}`;
  by("layer").value = chosen.layer;
  by("head").value = chosen.head;
  by("label").textContent = label();
  writeText();
  const rows = data.metrics.map((metric) => {
    const names = Object.keys(metric.values);
    const value = (weights) => (metric.values[weights] && metric.values[weights][chosen.layer] ? show(metric.values[weights][chosen.layer][chosen.head]) : "");
    return [metric.title, ...WEIGHTS.map((weights) => (names.includes(weights) ? value(weights) : ""))];
  });
  table(by("numbers-of-head"), ["metric", ...WEIGHTS], rows);
}
const WEIGHTS = ["trained", "random", "shuffled"];
function startPanel() {
  chart("true", () => drawLogits("true", logits().real, sameScale()));
  chart("fitted", () => drawLogits("fitted", logits().fit, sameScale()));
  chart("residual", () => drawLogits("residual", logits().rest, aroundZero()));
  chart("curve", drawCurve);
  chart("planes", drawPlanes);
  chart("place", drawPlace);
}
