// Text of models and documents is inserted with textContent and plain(), never as HTML.
const all = stored;
let data = all.models[0];
const chosen = { model: 0, layer: 0, head: 0, metric: 0, weights: data.model.weights, keys: "", labels: new Set(), search: "", order: { id: "head", down: false }, beside: null, view: "pattern", document: 0, theme: "" };

// The charts of the chosen model.
const modelCharts = () => CHARTS.models[chosen.model];

// Scores and labels of heads: without the sink, or of all keys as in the papers.
const swapsOf = (model) => (chosen.keys === "all" ? model.swaps.all_keys : model.swaps);
// Those of the chosen weights, which the panel shows; undefined where they were not measured.
const chosenSwaps = () => {
  const swaps = chosen.weights === data.model.weights ? data.swaps : data.swaps?.controls[chosen.weights];
  return chosen.keys === "all" ? swaps?.all_keys : swaps ?? undefined;
};

const defined = (values) => (values ?? []).flat().filter((x) => x !== null && x !== undefined);
// Steps down and to the right of the arrow keys, on a map whose first layer is at the bottom.
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };

function fill(select, pairs) {
  select.replaceChildren();
  for (const [value, text] of pairs) make(select, "option", text, { value });
}
function fillHeads() {
  fill(by("head"), Array.from({ length: data.model.heads[chosen.layer] }, (_, h) => [h, h]));
}
// Arrow keys choose the next layer or head, and Enter leads to the panel.
function walkHeads(event, steps) {
  const step = steps[event.key];
  if (event.key === "Enter") by("panel").focus();
  if (!step) return;
  event.preventDefault();
  const layer = Math.min(Math.max(chosen.layer + step[0], 0), data.model.layers.length - 1);
  choose(layer, Math.max(chosen.head + step[1], 0));
}
// Roles and portrait of a head, of the model itself or a control model.
const portraitOf = (l, h, weights = data.model.weights) => data.roles?.heads[weights]?.[l]?.[h];

// The documents, tokens and queries of a measurement in words.
function sizeOf(measurement) {
  const size = data.sizes[measurement];
  if (!size) return "";
  const queries = { null: "", 0: ", all queries" }[size.queries] ?? `, ${size.queries === 1 ? "one query" : `${size.queries} queries`} in each`;
  return `${size.documents === 1 ? "one document" : `${size.documents} documents`} of ${size.tokens} tokens${queries}`;
}

// A name inside a sentence, so that right-to-left text in it does not reorder the sentence.
const isolated = (name) => `\u2068${name}\u2069`;
const show = (x) => (x === null || x === undefined ? "undefined" : Math.abs(x) >= 1000 ? x.toFixed(0) : String(x));
const fixed = (x) => (x === null || x === undefined ? "undefined" : x.toFixed(3).replace(/^-(0\.0+)$/, "$1"));
// A mean with its interval was rounded to its uncertainty when the page was made.
const withInterval = (value) => (value ? (value.words ?? fixed(value.mean)) : "undefined");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Packed numbers: lo + (hi - lo) q / (2^bits - 2), the greatest integer for a missing value.
function unpack(packed) {
  const raw = atob(packed.data);
  const wide = packed.bits === 16;
  const top = wide ? 65534 : 254;
  const out = new Array(wide ? raw.length / 2 : raw.length);
  for (let i = 0; i < out.length; i++) {
    const code = wide ? raw.charCodeAt(2 * i) + 256 * raw.charCodeAt(2 * i + 1) : raw.charCodeAt(i);
    out[i] = code > top ? null : packed.lo + ((packed.hi - packed.lo) * code) / top;
  }
  return out;
}
