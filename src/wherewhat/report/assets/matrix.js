// The chosen head token by token: a matrix of queries and keys, linked with the text.
const DIVERGING = [[0, "#b35806"], [0.5, "#f7f7f7"], [1, "#2166ac"]];
const VIEWS = {
  pattern: "Attention pattern: share of a query's attention that a key gets, from 0 to 1.",
  logits: "Logits before softmax.",
  fit: "Fit: distance term + query term + key term.",
  residual: "Residual: logits minus fit.",
  where: "Where: the distance term a alone.",
  what: "What: the key term c alone.",
};
const record = () => data.records[chosen.layer][chosen.head];
function square(values, size) {
  const z = Array.from({ length: size }, () => new Array(size).fill(null));
  let at = 0;
  for (let i = 0; i < size; i++) for (let j = 0; j <= i; j++) z[i][j] = values[at++];
  return z;
}
// Softmax over the visible keys, and over the sink where the layer has one.
function softmax(row, sink) {
  const seen = row.filter((x) => x !== null);
  const top = Math.max(...seen, sink ?? -Infinity);
  const total = seen.reduce((sum, x) => sum + Math.exp(x - top), sink === null ? 0 : Math.exp(sink - top));
  return row.map((x) => (x === null ? null : Math.exp(x - top) / total));
}
function matrixOf(view) {
  const { map, a, b, c, sink } = record();
  const truth = unpack(map);
  const real = square(truth, Math.floor(Math.sqrt(2 * truth.length)));
  if (view === "pattern") return real.map((row) => softmax(row, sink ?? null));
  if (view === "logits" || !a) return real;
  const [where, query, key] = [unpack(a), unpack(b), unpack(c)];
  const term = {
    fit: (i, j) => where[i - j] + query[i] + key[j],
    residual: (i, j) => real[i][j] - (where[i - j] + query[i] + key[j]),
    where: (i, j) => where[i - j],
    what: (i, j) => key[j],
  }[view];
  return real.map((row, i) => row.map((x, j) => (x === null || i - j >= where.length ? null : term(i, j))));
}
// A token as a short label: control and format characters as escapes, spaces visible.
function tokenLabel(piece) {
  const escaped = piece.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (x) => (x === "\n" ? "⏎" : `\\u${x.codePointAt(0).toString(16)}`)).replace(/\s/g, "·");
  const characters = [...escaped];
  return characters.length > 10 ? `${characters.slice(0, 9).join("")}…` : escaped;
}
function drawMatrix() {
  const z = matrixOf(chosen.view);
  const pieces = data.text.tokens.slice(0, z.length);
  const digits = chosen.view === "pattern" ? 3 : 2;
  const text = z.map((row, i) => row.map((x, j) => (x === null ? "" : `${plain(JSON.stringify(pieces[i]))} → ${plain(JSON.stringify(pieces[j]))}<br>distance ${i - j}: ${x.toFixed(digits)}`)));
  const reach = Math.max(Math.abs(record().map.lo), Math.abs(record().map.hi)) || 1;
  const scale = chosen.view === "pattern" ? { zmin: 0, zmax: 1, colorscale: "Viridis" } : { zmin: -reach, zmax: reach, colorscale: DIVERGING };
  // As many labels as fit.
  const axis = (pixels) => {
    const every = Math.ceil((10 * z.length) / Math.max(100, pixels));
    const ticks = pieces.map((_, i) => i).filter((i) => i % every === 0);
    return { tickvals: ticks, ticktext: ticks.map((i) => plain(tokenLabel(pieces[i]))), tickfont: { size: 9 }, showgrid: false, zeroline: false };
  };
  draw("matrix", [{ type: "heatmap", z, text, hoverinfo: "text", colorbar: { thickness: 10, title: { text: chosen.view === "pattern" ? "attention" : "logit", side: "right" } }, ...scale }], {
    xaxis: { ...axis(by("matrix").clientWidth - 160), ...axisTitle("key"), range: [-0.5, z.length - 0.5], tickangle: -90 },
    yaxis: { ...axis(by("matrix").clientHeight - 92), ...axisTitle("query"), range: [z.length - 0.5, -0.5] },
    margin: { l: 84, r: 8, t: 8, b: 84 },
  });
  const place = by("matrix");
  place.removeAllListeners("plotly_hover");
  place.removeAllListeners("plotly_unhover");
  place.on("plotly_hover", (event) => mark(event.points[0].y, event.points[0].x));
  place.on("plotly_unhover", () => mark(null, null));
}
// Mark a query and a key in the matrix and in the text; null for none.
function mark(query, key) {
  const tokens = by("text").children;
  for (const name of ["query", "key"]) by("text").querySelector(`.${name}`)?.classList.remove(name);
  if (query !== null) tokens[query]?.classList.add("query");
  if (key !== null) tokens[key]?.classList.add("key");
  const size = by("matrix")._fullLayout?._size;
  const count = by("matrix").data?.[0].z.length;
  const strip = (id, at, style) => {
    by(id).hidden = at === null || !count || at >= count;
    if (!by(id).hidden) Object.assign(by(id).style, style());
  };
  const px = (x) => `${x}px`;
  strip("marked-query", query, () => ({ left: px(size.l), width: px(size.w), top: px(size.t + (size.h * query) / count), height: px(size.h / count) }));
  strip("marked-key", key, () => ({ top: px(size.t), height: px(size.h), left: px(size.l + (size.w * key) / count), width: px(size.w / count) }));
}
function writeText() {
  const place = document.createDocumentFragment();
  const c = record().c ? unpack(record().c).map((x) => x ?? 0) : data.text.tokens.slice(0, 48).map(() => 0);
  const most = Math.max(...c.map(Math.abs), 0) || 1;
  data.text.tokens.slice(0, c.length).forEach((piece, j) => {
    const share = Math.min(1, Math.abs(c[j]) / most);
    const token = make(place, "span", piece, { title: `c = ${c[j].toFixed(3)}` });
    token.style.backgroundColor = c[j] > 0 ? `rgba(86, 160, 233, ${share})` : `rgba(230, 159, 0, ${share})`;
  });
  by("text").replaceChildren(place);
}
function writeView() {
  const views = Object.keys(VIEWS).filter((view) => record().a || ["pattern", "logits"].includes(view));
  if (!views.includes(chosen.view)) chosen.view = "pattern";
  fill(by("view"), views.map((view) => [view, view]));
  by("view").value = chosen.view;
  by("view-note").textContent = `${VIEWS[chosen.view]} Rows are queries, columns keys: the first tokens of ${data.text.document}.`;
}
function startMatrix() {
  chart("matrix", drawMatrix);
  by("view").addEventListener("change", (event) => {
    chosen.view = event.target.value;
    writeView();
    redraw("matrix");
    saveView();
  });
  by("text").addEventListener("mouseover", (event) => {
    const key = [...by("text").children].indexOf(event.target);
    mark(null, key < 0 ? null : key);
  });
  by("text").addEventListener("mouseleave", () => mark(null, null));
}
