// The chosen head token by token: a matrix of queries and keys, linked with the text.
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];
const DIVERGING = [[179, 88, 6], [247, 247, 247], [33, 102, 172]];
const VIEWS = {
  pattern: "Attention pattern: share of a query's attention that a key gets, from 0 to 1.",
  logits: "Logits before softmax.",
  fit: "Fit: distance term + query term + key term.",
  residual: "Residual: logits minus fit.",
  where: "Where: the distance term a alone.",
  what: "What: the key term c alone.",
};
const record = (l = chosen.layer, h = chosen.head) => data.records[l][h];
const passage = () => data.texts[chosen.document];
// The document whose curves are drawn: repeated random tokens have none.
const fitted = () => (record().documents[chosen.document].a ? chosen.document : 0);
// A lower triangle, row after row, as a matrix.
function square(values) {
  const size = Math.floor(Math.sqrt(2 * values.length));
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
// Logits and terms of a head on the chosen document. The first distances are all there, so that d is an index.
const known = new WeakMap();
function decoded(l, h) {
  const packed = record(l, h).documents[chosen.document];
  if (!known.has(packed)) known.set(packed, decodedLogits(record(l, h).mean, packed));
  return known.get(packed);
}
function decodedLogits(packedMean, packed) {
  const stored = square(unpack(packed.map ?? packed.rest));
  if (!packed.a) return { real: stored };
  const [mean, away, query, key] = [packedMean, packed.a, packed.b, packed.c].map(unpack);
  const where = away.map((x, d) => (x === null || mean[d] === null ? null : mean[d] + x + packed.level));
  const fit = (i, j) => (i - j < where.length && where[i - j] !== null ? where[i - j] + query[i] + key[j] : null);
  // Of further documents the difference to the fit is stored.
  const real = packed.map ? stored : stored.map((row, i) => row.map((x, j) => (x === null ? null : x + fit(i, j))));
  return { real, where, key, fit };
}
function matrixOf(view, l, h) {
  const { real, where, key, fit } = decoded(l, h);
  if (view === "pattern") return real.map((row) => softmax(row, record(l, h).sink ?? null));
  if (view === "logits" || !where) return real;
  const term = {
    fit,
    residual: (i, j) => real[i][j] - fit(i, j),
    where: (i, j) => where[i - j],
    what: (i, j) => key[j],
  }[view];
  return real.map((row, i) => row.map((x, j) => (x === null || fit(i, j) === null ? null : term(i, j))));
}
// A token as a short label: control and format characters as escapes, spaces visible.
function tokenLabel(piece) {
  const escaped = piece.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (x) => (x === "\n" ? "⏎" : `\\u${x.codePointAt(0).toString(16)}`)).replace(/\s/g, "·");
  const characters = [...escaped];
  return characters.length > 10 ? `${characters.slice(0, 9).join("")}…` : escaped;
}
// Colour stops of the pattern, from 0 to 1, and of everything else, around 0.
const scaleOf = (view) => {
  const heads = [[chosen.layer, chosen.head], ...(chosen.beside ? [chosen.beside] : [])];
  const reach = Math.max(...heads.flatMap((head) => defined(decoded(...head).real)).map(Math.abs)) || 1;
  return view === "pattern" ? { low: 0, high: 1, stops: VIRIDIS, name: "attention" } : { low: -reach, high: reach, stops: DIVERGING, name: "logit" };
};
function colourAt(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const mixed = stops[i].map((x, k) => Math.round(x + (stops[i + 1][k] - x) * (at - i)));
  return `rgb(${mixed.join(",")})`;
}
// On a canvas, which is drawn in a few milliseconds; the picture for download is a chart of Plotly.
let shown = { z: [], left: 84, top: 4, width: 0, height: 0 };
function drawMatrix() {
  const scale = scaleOf(chosen.view);
  const { low, high, stops, name } = scale;
  // Both canvases have the same size.
  if (chosen.beside) drawHead(by("matrix-beside"), matrixOf(chosen.view, ...chosen.beside), scale);
  drawHead(by("matrix"), matrixOf(chosen.view), scale);
  by("scale").style.backgroundImage = `linear-gradient(to right, ${stops.map((stop) => `rgb(${stop.join(",")})`).join(", ")})`;
  by("scale-low").textContent = low.toFixed(low ? 1 : 0);
  by("scale-high").textContent = `${high.toFixed(low ? 1 : 0)} (${name})`;
  pointAt(null);
}
function drawHead(canvas, z, { low, high, stops }) {
  const ratio = devicePixelRatio || 1;
  const [across, down] = [canvas.clientWidth, canvas.clientHeight];
  shown = { ...shown, z, width: (across - 88) / z.length, height: (down - 88) / z.length };
  [canvas.width, canvas.height] = [across * ratio, down * ratio];
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  z.forEach((row, i) => row.forEach((x, j) => {
    if (x === null) return;
    pen.fillStyle = colourAt(stops, (x - low) / (high - low));
    // Whole pixels, so that there are no seams between cells.
    const [x0, x1] = [j, j + 1].map((at) => Math.round(shown.left + at * shown.width));
    const [y0, y1] = [i, i + 1].map((at) => Math.round(shown.top + at * shown.height));
    pen.fillRect(x0, y0, x1 - x0, y1 - y0);
  }));
  pen.fillStyle = isDark() ? "#ececf1" : "#1b1b1f";
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const labels = passage().tokens.slice(0, z.length).map(tokenLabel);
  // As many labels as fit.
  const write = (size, place) => labels.forEach((label, i) => {
    if (i % Math.ceil(10 / size)) return;
    pen.save();
    place(i);
    pen.fillText(label, 0, 0, 78);
    pen.restore();
  });
  write(shown.height, (i) => pen.translate(shown.left - 4, shown.top + (i + 0.5) * shown.height));
  write(shown.width, (j) => {
    pen.translate(shown.left + (j + 0.5) * shown.width, down - 80);
    pen.rotate(-Math.PI / 2);
  });
}
function pictureOfMatrix() {
  const { low, high, stops, name } = scaleOf(chosen.view);
  const z = matrixOf(chosen.view);
  const colorscale = stops.map((stop, i) => [i / (stops.length - 1), `rgb(${stop.join(",")})`]);
  const axis = { tickvals: z.map((_, i) => i), ticktext: z.map((_, i) => plain(tokenLabel(passage().tokens[i]))), tickfont: { size: 8 }, showgrid: false, zeroline: false };
  return {
    data: [{ type: "heatmap", z, zmin: low, zmax: high, colorscale, colorbar: { title: { text: name } } }],
    layout: themed({ xaxis: { ...axis, title: { text: "key" } }, yaxis: { ...axis, title: { text: "query" }, autorange: "reversed" }, margin: { l: 84, r: 8, t: 8, b: 84 } }),
  };
}
function numbersOfMatrix() {
  const pieces = passage().tokens.map((token) => JSON.stringify(token));
  const lines = matrixOf(chosen.view).flatMap((row, i) => row.slice(0, i + 1).map((x, j) => [i, pieces[i], j, pieces[j], x]));
  return [["query", "query token (JSON)", "key", "key token (JSON)", chosen.view], ...lines];
}
// Mark a query and a key in the matrix and in the text, and say what is about them; null for none.
let marked = [null, null];
function mark(query, key, about = aboutCell) {
  marked = [query, key];
  const tokens = by("text").children;
  for (const name of ["query", "key"]) by("text").querySelector(`.${name}`)?.classList.remove(name);
  if (query !== null) tokens[query]?.classList.add("query");
  if (key !== null) tokens[key]?.classList.add("key");
  const { z, left, top, width, height } = shown;
  const strip = (name, at, place) => {
    for (const line of document.querySelectorAll(`.marked-${name}`)) {
      line.hidden = at === null || at >= z.length;
      Object.entries(place).forEach(([side, x]) => (line.style[side] = `${x}px`));
    }
  };
  strip("query", query, { left, top: top + height * query, width: width * z.length, height });
  strip("key", key, { left: left + width * key, top, width, height: height * z.length });
  by("cell").textContent = query === null || key === null ? "Point at a cell or at a token of the text." : about(query, key);
}
const quoted = (i) => JSON.stringify(passage().tokens[i]);
function aboutCell(query, key) {
  const beside = chosen.beside ? `; ${headName(...chosen.beside)}: ${matrixOf(chosen.view, ...chosen.beside)[query][key]?.toFixed(3) ?? "not seen"}` : "";
  return `${quoted(query)} → ${quoted(key)}, distance ${query - key}: ${shown.z[query][key].toFixed(3)}${beside}`;
}
function markCell(query, key) {
  const isCell = query >= 0 && key >= 0 && query < shown.z.length && key <= query && shown.z[query][key] !== null;
  if (isCell) mark(query, key);
  return isCell;
}
function writeView() {
  const views = Object.keys(VIEWS).filter((view) => record().documents[chosen.document].a || ["pattern", "logits"].includes(view));
  if (!views.includes(chosen.view)) chosen.view = "pattern";
  fill(by("view"), views.map((view) => [view, { where: "where: distance term a", what: "what: key term c" }[view] ?? view]));
  by("view").value = chosen.view;
  fill(by("document"), data.texts.map((text, i) => [i, text.document]));
  by("document").value = chosen.document;
  by("document").disabled = data.texts.length < 2;
  // Prose hides the stripe of an induction head, because few of its tokens come again soon.
  const last = data.texts.length - 1;
  const hides = last && chosen.document !== last && !record().documents[last].a && portraitOf(chosen.layer, chosen.head)?.roles.includes("induction");
  const hint = hides ? ` Choose ${isolated(data.texts[last].document)} as document to see the stripe of this induction head.` : "";
  by("view-note").textContent = `${VIEWS[chosen.view]} Rows are queries, columns keys: the first ${decoded().real.length} tokens of ${isolated(passage().document)}.${hint}`;
}
function startMatrix() {
  chart("matrix", drawMatrix, { numbers: numbersOfMatrix, picture: pictureOfMatrix });
  addEventListener("resize", () => redraw("matrix"));
  const cellAt = (event) => [Math.floor((event.offsetY - shown.top) / shown.height), Math.floor((event.offsetX - shown.left) / shown.width)];
  for (const canvas of document.querySelectorAll("#matrix, #matrix-beside")) {
    canvas.addEventListener("mousemove", (event) => markCell(...cellAt(event)) || pointAt(null));
    canvas.addEventListener("mouseleave", () => pointAt(null));
  }
  by("matrix").addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    if (marked[0] === null || marked[1] === null || marked[0] === locked) return void mark(shown.z.length - 1, 0);
    markCell(marked[0] - step[0], marked[1] + step[1]);
  });
  by("view").addEventListener("change", (event) => {
    chosen.view = event.target.value;
    writeView();
    redraw("matrix");
    saveView();
  });
  by("document").addEventListener("change", (event) => {
    chosen.document = +event.target.value;
    writePanel();
    redrawPanel();
    redraw("thumbnails");
    saveView();
  });
}
