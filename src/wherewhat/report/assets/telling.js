// The overview: one sentence, and three heads with pattern, distance curve and one query's attention over the text.
const KINDS = {
  positional: "Swap tokens: attention stays in place.",
  symbolic: "Swap tokens: attention follows them.",
  mixed: "Swap tokens: attention does some of both.",
};
// One pixel for each cell; the style enlarges them.
function drawPattern(canvas, pattern) {
  canvas.width = canvas.height = pattern.length;
  const pen = canvas.getContext("2d");
  pattern.forEach((row, i) => row.forEach((x, j) => {
    if (x === null) return;
    pen.fillStyle = colourAt(VIRIDIS, x);
    pen.fillRect(j, i, 1, 1);
  }));
}
// The mean distance curve of a head with its interval, where there is one.
function curveOf({ mean, half }) {
  const [middle, reach] = [unpack(mean), half ? unpack(half) : []];
  return data.distances.slice(0, middle.length).map((d, i) => ({ d, y: middle[i], reach: reach[i] ?? 0 })).filter(({ y }) => y !== null);
}
const round = (x) => +x.toFixed(1);
// A curve over the logarithm of the distance, on the axis that all heads of the overview share.
function drawSmallCurve(place, curve, [low, high]) {
  const picture = by("small-curve").content.firstElementChild.cloneNode(true);
  const [width, height, left, bottom] = [180, 180, 26, 18];
  const far = Math.log1p(curve.at(-1).d);
  const x = (d) => round(left + ((width - left - 4) * Math.log1p(d)) / far);
  const y = (value) => round(8 + ((height - bottom - 12) * (high - value)) / (high - low));
  const set = (node, attributes) => Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
  const write = (text, attributes) => {
    const node = document.createElementNS(picture.namespaceURI, "text");
    set(node, attributes);
    node.textContent = text;
    picture.append(node);
  };
  const path = (points) => points.map(([d, value]) => `${x(d)},${y(Math.min(Math.max(value, low), high))}`).join(" ");
  const edge = (sign) => curve.map(({ d, y: middle, reach }) => [d, middle + sign * reach]);
  const [axis, band, line] = picture.children;
  set(axis, { x1: left, x2: width - 4, y1: y(0), y2: y(0) });
  set(band, { points: path([...edge(1), ...edge(-1).reverse()]) });
  set(line, { points: path(edge(0)) });
  for (const d of [0, 1, 4, 16, 64, 256, 1024, 4096].filter((d) => d <= curve.at(-1).d)) write(d, { x: x(d), y: height - 4, "text-anchor": "middle" });
  for (const value of new Set([low, 0, high])) write(value, { x: left - 4, y: y(value) + 3, "text-anchor": "end" });
  place.append(picture);
}
// A whole number at or beyond a value, or a tenth where it is small.
const outward = (x) => Math.sign(x) * (Math.abs(x) > 1 ? Math.ceil(Math.abs(x)) : Math.ceil(10 * Math.abs(x)) / 10);
// The tokens up to a query, coloured by its attention; the square root lets small shares be seen.
function writeAttention(item, row, { start, query, key }) {
  const { tokens } = data.texts[0];
  const inPercent = (j) => `${(100 * row[j]).toFixed(0)} %`;
  const line = make(item, "p", start ? "… " : null, { class: "attention", dir: "auto" });
  for (let j = start; j <= query; j++) {
    const [, space, piece] = /^( *)(.*)$/s.exec(tokens[j]);
    line.append(space);
    const token = make(line, "span", piece.replaceAll("\n", "⏎") || "·", { title: inPercent(j) });
    token.style.setProperty("--share", Math.sqrt(row[j]).toFixed(2));
    if (j === query) token.classList.add("query");
  }
  const quoted = (j) => `“${isolated(tokenLabel(tokens[j].trim() || tokens[j]))}”`;
  make(item, "p", `${quoted(query)} → ${quoted(key)}, ${plural(query - key, "token")} back: ${inPercent(key)} of attention`, { class: "note" });
}
const described = (text) => ({ role: "img", "aria-label": text, title: text });
function writeScores(item, { layer, head }) {
  const line = make(item, "p", null, { class: "scores" });
  for (const [name, title] of [["s_pos", "positional"], ["s_sym", "symbolic"]]) {
    const [value, low, high] = ["", "_low", "_high"].map((end) => data.swaps[`${name}${end}`][layer]?.[head] ?? null);
    const score = make(line, "span", `${title} ${value.toFixed(2)}`, low === null ? {} : { title: `${fixed(value)} (${fixed(low)} to ${fixed(high)})` });
    score.style.setProperty("--share", value);
  }
}
function writeOverview() {
  const { heads, missing } = data.telling;
  by("summary").textContent = data.summary?.short ?? "";
  by("summary").title = data.summary?.text ?? "";
  by("telling").replaceChildren();
  const records = heads.map(({ layer, head }) => data.records[layer]?.[head] ?? {});
  const curves = records.map((own) => (own.mean ? curveOf(own) : []));
  const values = curves.flat().map(({ y }) => y);
  // Without position encoding all curves are 0.
  const span = [outward(Math.min(...values, 0)), outward(Math.max(...values, 0)) || (values.some((y) => y < 0) ? 0 : 1)];
  heads.forEach((head, i) => {
    const name = headName(head.layer, head.head);
    const item = make(by("telling"), "li");
    const title = make(item, "h3", `Most ${head.kind}: `);
    make(title, "a", name, { href: `#panel?${new URLSearchParams({ ...(all.models.length > 1 ? { model: data.model.name } : {}), head: name })}` });
    writeScores(item, head);
    make(item, "p", KINDS[head.kind], { class: "note" });
    const pictures = make(item, "div", null, { class: "pictures" });
    const [packed] = records[i].documents ?? [];
    const pattern = packed?.map ? square(unpack(packed.map)).map((row) => softmax(row, records[i].sink ?? null)) : null;
    if (pattern) {
      const figure = make(pictures, "figure");
      drawPattern(make(figure, "canvas", null, described(`Attention pattern of ${name}: queries from top to bottom, keys from left to right, the first ${pattern.length} tokens of ${data.texts[0].document}`)), pattern);
      make(figure, "figcaption", "attention pattern");
    }
    if (curves[i].length > 1) {
      const figure = make(pictures, "figure");
      drawSmallCurve(make(figure, "div", null, described(`Distance curve of ${name}: the part of its logits that depends on the distance only, over the logarithm of the distance in tokens, mean of ${sizeOf("axes")}${records[i].half ? " with its 95 % interval" : ""}; one scale for all heads here`)), curves[i], span);
      make(figure, "figcaption", "logit by distance");
    }
    if (pattern && head.line) writeAttention(item, pattern[head.line.query], head.line);
  });
  by("telling-note").textContent = [
    heads.length ? "Chosen by scores without the sink, of heads that are neither sinks nor uniform: the largest difference either way, and both scores nearest to 0.5. A name opens the head." : "",
    ...missing,
  ].filter(Boolean).join(" ");
  writeHero();
  by("overview").hidden = !data.summary && !heads.length && !missing.length;
}
