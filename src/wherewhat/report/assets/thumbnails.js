// The patterns of all heads on one canvas: layers from left to right, heads from top to bottom.
const LARGEST = 4096; // pixels of the stored picture's side, which all browsers can draw
const COLOURS = 256;
const rgba = Array.from({ length: COLOURS }, (_, i) => {
  const [red, green, blue] = colourAt(VIRIDIS, i / (COLOURS - 1)).match(/\d+/g).map(Number);
  return (255 << 24) | (blue << 16) | (green << 8) | red;
});
const MISSING = 65535;
const weights = new Float64Array(LARGEST);
// A head's pattern as colours in a picture. Plain loops over the packed logits: a large model has a thousand heads.
function paintHead(pixels, width, [left, top], side, { map }, sink = null) {
  const raw = atob(map.data);
  const [step, tokens] = [(map.hi - map.lo) / 65534, Math.floor(Math.sqrt(raw.length))];
  const codeAt = (pair) => raw.charCodeAt(2 * pair) | (raw.charCodeAt(2 * pair + 1) << 8);
  for (let y = 0; y < side; y++) {
    const i = Math.floor(((y + 0.5) * tokens) / side);
    const start = (i * (i + 1)) / 2;
    let most = sink ?? -Infinity;
    for (let j = 0; j <= i; j++) {
      const code = codeAt(start + j);
      weights[j] = code === MISSING ? -Infinity : map.lo + step * code;
      if (weights[j] > most) most = weights[j];
    }
    let total = sink === null ? 0 : Math.exp(sink - most);
    for (let j = 0; j <= i; j++) total += weights[j] = Math.exp(weights[j] - most);
    for (let x = 0; x < side; x++) {
      const j = Math.floor(((x + 0.5) * tokens) / side);
      // The square root lets small shares be seen.
      if (j <= i && codeAt(start + j) !== MISSING) pixels[(top + y) * width + left + x] = rgba[Math.round(Math.sqrt(weights[j] / total) * (COLOURS - 1))];
    }
  }
}
// The chosen document, or the first where the chosen one has only differences to the fit.
const thumbnailText = () => (data.records[0][0].documents[chosen.document].map ? chosen.document : 0);
// The picture of all heads of a model on a document, made once.
const pictures = new WeakMap();
function patternsOf(model, text) {
  const [{ documents: texts }] = model.records[0];
  if (pictures.has(texts[text])) return pictures.get(texts[text]);
  const [across, down] = [model.model.layers.length, Math.max(...model.model.heads)];
  const tokens = Math.floor(Math.sqrt(atob(texts[text].map.data).length));
  const side = Math.max(1, Math.min(tokens, Math.floor(LARGEST / Math.max(across, down))));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [across * side, down * side];
  const image = new ImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  model.records.forEach((heads, l) => heads.forEach((head, h) => paintHead(pixels, canvas.width, [l * side, h * side], side, head.documents[text], head.sink)));
  canvas.getContext("2d").putImageData(image, 0, 0);
  pictures.set(texts[text], canvas);
  return canvas;
}
const [LEAST, MOST] = [18, 72]; // pixels of a head's side on the page
let cell = LEAST;
function drawThumbnails() {
  const canvas = by("thumbnails");
  const [across, down] = [data.model.layers.length, Math.max(...data.model.heads)];
  cell = Math.min(MOST, Math.max(LEAST, Math.floor(canvas.parentElement.clientWidth / across)));
  const ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [across * cell * ratio, down * cell * ratio];
  [canvas.style.width, canvas.style.height] = [`${across * cell}px`, `${down * cell}px`];
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const source = patternsOf(data, thumbnailText());
  const side = source.width / across;
  for (const { l, h, shown } of rows) {
    // Heads that the filter hides are faint.
    pen.globalAlpha = shown ? 1 : 0.12;
    pen.drawImage(source, l * side, h * side, side, side, l * cell, h * cell, cell - 1, cell - 1);
  }
  placeThumbnailBox();
}
function placeThumbnailBox() {
  const place = { left: chosen.layer * cell - 1, top: chosen.head * cell - 1, width: cell + 1, height: cell + 1 };
  for (const [name, x] of Object.entries(place)) by("chosen-thumbnail").style[name] = `${x}px`;
}
function startThumbnails() {
  chart("thumbnails", drawThumbnails, { downloads: false });
  addEventListener("resize", () => redraw("thumbnails"));
  const headAt = (event) => {
    const [l, h] = [Math.floor(event.offsetX / cell), Math.floor(event.offsetY / cell)];
    return h < data.model.heads[l] ? [l, h] : null;
  };
  by("thumbnails").addEventListener("mousemove", (event) => {
    const head = headAt(event);
    by("thumbnail-note").textContent = head ? `${headName(...head)}. ${portraitOf(...head)?.portrait ?? ""}` : "";
  });
  by("thumbnails").addEventListener("click", (event) => headAt(event) && openHead(...headAt(event), event));
  by("thumbnails").addEventListener("keydown", (event) => walkHeads(event, { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }));
}
