// The text of the panel: coloured by the key term, or by the attention of the token that is pointed at or kept.
let keyTerms = [];
let locked = null;
const BLUE = "86, 160, 233";
const ORANGE = "230, 159, 0";
// The elements of a text stay while heads change, and only their colours are set.
function writeText() {
  const packed = chosen.document ? record().documents[chosen.document].c : record().key;
  keyTerms = packed ? unpack(packed).map((x) => x ?? 0) : passage().tokens.slice(0, decoded().real.length).map(() => 0);
  const pieces = passage().tokens.slice(0, keyTerms.length);
  const place = by("text");
  if (writeText.of !== passage() || place.children.length !== pieces.length) {
    const spans = document.createDocumentFragment();
    for (const piece of pieces) make(spans, "span", piece);
    place.replaceChildren(spans);
    writeText.of = passage();
    locked = null;
  }
  colourText(locked);
}
// The attention of a token to those up to it, and that of later tokens to it; null where the excerpt has none.
function attentionAround(token) {
  const pattern = matrixOf("pattern");
  if (token === null || token >= pattern.length) return null;
  return pattern.map((row, i) => (i <= token ? pattern[token][i] : row[token]) ?? 0);
}
function colourText(token) {
  const shares = attentionAround(token);
  // A text on which the logits were not fitted has no key terms.
  const hasTerms = keyTerms.some(Boolean);
  const most = Math.max(...keyTerms.map(Math.abs), 0) || 1;
  [...by("text").children].forEach((span, j) => {
    // The square root lets small shares of attention be seen.
    const strength = shares ? Math.sqrt(shares[j] ?? 0) : Math.min(1, Math.abs(keyTerms[j]) / most);
    const isBlue = shares ? j <= token : keyTerms[j] > 0;
    span.style.backgroundColor = `rgba(${isBlue ? BLUE : ORANGE}, ${strength.toFixed(2)})`;
    span.title = shares ? `${(100 * (shares[j] ?? 0)).toFixed(0)} %` : hasTerms ? `c = ${keyTerms[j].toFixed(2)}` : "";
  });
  by("text-note").textContent = shares
    ? "Blue: attention of the marked token to those up to it. Orange: attention of later tokens to it. The colour is the square root of the share."
    : `${hasTerms ? "Key term: blue tokens get more attention from every later token, orange ones less, at any distance. " : ""}Point at a token to see its attention; a click keeps it.`;
}
// Where a token's attention goes, and which later token attends to it most.
function aboutToken(token) {
  const shares = attentionAround(token);
  const largest = (from, to) => shares.slice(from, to).reduce((best, x, i) => (x > shares[best] ? from + i : best), from);
  const percent = (x) => `${(100 * x).toFixed(0)}\u00a0%`;
  const to = largest(0, token + 1);
  const from = token + 1 < shares.length ? largest(token + 1) : null;
  const later = from === null ? "" : `; of later tokens ${quoted(from)} gives it most, ${percent(shares[from])}`;
  return `${quoted(token)} gives ${percent(shares[to])} of its attention to ${quoted(to)}, its largest share${later}.`;
}
// Mark a token and colour the text by its attention; null for the token that is kept, or none.
function pointAt(token) {
  const shown = token ?? locked;
  colourText(shown);
  mark(attentionAround(shown) ? shown : null, shown, aboutToken);
}
function keepToken(token) {
  locked = locked === token ? null : token;
  pointAt(null);
}
function startText() {
  const tokenAt = (event) => {
    const token = [...by("text").children].indexOf(event.target);
    return token < 0 ? null : token;
  };
  by("text").addEventListener("mouseover", (event) => locked === null && pointAt(tokenAt(event)));
  by("text").addEventListener("mouseleave", () => pointAt(null));
  by("text").addEventListener("click", (event) => keepToken(tokenAt(event)));
  by("text").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && marked[1] !== null) keepToken(marked[1]);
    if (event.key === "Escape") keepToken(locked);
    if (!step) return;
    event.preventDefault();
    const last = by("text").children.length - 1;
    locked = null;
    pointAt(marked[1] === null ? 0 : Math.min(Math.max(marked[1] + step, 0), last));
  });
}
