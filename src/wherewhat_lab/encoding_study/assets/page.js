// Text from files is only ever set through textContent.
const data = JSON.parse(by("data").textContent);
// Okabe and Ito's colours, suited to colour-blind readers; marks and dashes repeat the distinction.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900"];
const MARKS = ["circle", "square", "triangle-up", "cross", "x", "star", "pentagon", "hexagon"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash"];
const hidden = new Set();

const shown = () => data.encodings.map((one, index) => ({ ...one, index })).filter((one) => !hidden.has(one.name));
const fixed = (x, digits = 3) => (x === null || x === undefined ? "none" : x.toFixed(digits));
const whole = (x) => (x === null ? "none" : Math.round(x).toLocaleString("en"));
const faint = (colour) => colour + "33";

// A chart without its own legend: the legend at the top applies to all charts.
const plot = (id, traces, layout) =>
  draw(id, traces, { margin: { l: 64, r: 12, t: 12, b: 44 }, showlegend: false, ...layout });

// A line with its band; x and the band's edges are the same length.
function lines(one, x, curve, axes = {}) {
  const colour = COLOURS[one.index % COLOURS.length];
  const keep = x.map((_, i) => i).filter((i) => curve.mid[i] !== null);
  const at = (values) => keep.map((i) => values[i]);
  return [
    { x: [...at(x), ...at(x).reverse()], y: [...at(curve.high), ...at(curve.low).reverse()], fill: "toself", fillcolor: faint(colour), line: { width: 0 }, mode: "lines", hoverinfo: "skip", ...axes },
    { x: at(x), y: at(curve.mid), name: one.name, mode: "lines", line: { color: colour, width: 2, dash: DASHES[one.index % DASHES.length] }, hovertemplate: `${one.name}: %{y:.3f} at %{x}<extra></extra>`, ...axes },
  ];
}

// ---- 1. curves over training: step 0 is drawn at half of the first step after it
const first = Math.min(...data.encodings.map((one) => one.steps.find((step) => step > 0) || 1));
const onAxis = (step) => (step === null ? null : Math.max(step, first / 2));
// Steps at which half of a change was first and, if later, permanently reached: [spread over seeds, symbol, words].
function marks(one, event) {
  const half = one.half[event];
  if (!half || half.mid === null) return [];
  const lasting = one.lasting[event];
  const found = [[half, (name) => name, "half-way"]];
  if (lasting.mid > half.mid) found.push([lasting, (name) => `${name}-open`, "permanently half-way"]);
  return found;
}
function drawTime() {
  const count = data.panels.length;
  const gap = 0.012;
  const layout = { height: 150 * count, margin: { l: 72, r: 12, t: 8, b: 44 }, xaxis: { type: "log", title: { text: "training step (0 is at the left edge)" }, anchor: `y${count}` }, shapes: [] };
  const traces = [];
  data.panels.forEach((panel, row) => {
    const suffix = row === 0 ? "" : String(row + 1);
    if (panel.name === "r") {
      const floor = data.about.noise_floor;
      layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: `y${suffix}`, y0: floor, y1: floor, line: { dash: "dot", width: 1, color: isDark() ? "#b3b3bf" : "#55555e" } });
    }
    const top = 1 - row / count;
    layout[`yaxis${suffix}`] = { domain: [top - 1 / count + gap, top], title: { text: panel.title, font: { size: 11 } }, automargin: false, nticks: 5 };
    for (const one of shown()) {
      const axes = { xaxis: "x", yaxis: `y${suffix}` };
      traces.push(...lines(one, one.steps.map(onAxis), one.curves[panel.name], axes));
      const curve = one.curves[panel.name].mid;
      const level = (curve[0] + curve[curve.length - 1]) / 2;
      for (const [mark, symbol, words] of marks(one, panel.name)) {
        traces.push({ x: [onAxis(mark.mid)], y: [level], mode: "markers", marker: { symbol: symbol("diamond"), size: 9, color: COLOURS[one.index % COLOURS.length], line: { width: 1.5, color: isDark() ? "#fff" : "#000" } }, hovertemplate: `${one.name}: ${words} at step ${whole(mark.mid)}${mark.missing ? `, ${mark.missing} seeds without` : ""}<extra></extra>`, ...axes });
      }
    }
  });
  by("time").style.height = `${layout.height}px`;
  plot("time", traces, layout);
}

// ---- 2. order of events
const title = (name) => data.panels.find((panel) => panel.name === name).title.replace(/ \(.*/, "");
function drawWhen() {
  const traces = shown().map((one) => {
    const all = data.events.flatMap((event) => marks(one, event).map(([mark, symbol, words]) => ({ ...mark, symbol, words, event })));
    return {
      x: all.map((mark) => mark.mid), y: all.map((mark) => title(mark.event)), name: one.name, mode: "markers",
      marker: { size: 11, color: COLOURS[one.index % COLOURS.length], symbol: all.map((mark) => mark.symbol(MARKS[one.index % MARKS.length])) },
      error_x: { type: "data", symmetric: false, array: all.map((mark) => mark.high - mark.mid), arrayminus: all.map((mark) => mark.mid - mark.low), thickness: 1 },
      text: all.map((mark) => mark.words), hovertemplate: `${one.name}: %{y} %{text} at step %{x:.0f}<extra></extra>`,
    };
  });
  plot("when", traces, { margin: { l: 150, r: 12, t: 12, b: 44 }, xaxis: { type: "log", title: { text: "training step" } }, yaxis: { type: "category", autorange: "reversed", categoryorder: "array", categoryarray: data.events.map(title) } });
  const table = by("when-table");
  table.replaceChildren();
  const head = make(make(table, "thead"), "tr");
  for (const name of ["encoding", ...data.events.map(title)]) make(head, "th", name, { scope: "col" });
  const body = make(table, "tbody");
  for (const one of data.encodings) {
    const row = make(body, "tr");
    make(row, "th", one.name, { scope: "row" });
    for (const event of data.events) {
      const found = marks(one, event).map(([mark]) => `${whole(mark.mid)} (${whole(mark.low)}–${whole(mark.high)})${mark.missing ? `, ${mark.missing} without` : ""}`);
      make(row, "td", found.join("; permanently ") || "none");
    }
  }
}

// ---- 3. to 5. measurements after training
function choices(id, options, redraw) {
  for (const [value, text] of options) make(by(id), "option", text, { value });
  by(id).addEventListener("change", redraw);
}
const methods = [...new Set(data.encodings.flatMap((one) => Object.keys(one.lengths.methods)))];
function drawLength() {
  const method = by("method").value;
  const traces = [];
  const without = [];
  for (const one of shown()) {
    const curve = one.lengths.methods[method];
    if (curve) traces.push(...lines(one, one.lengths.position, curve)); else without.push(one.name);
  }
  by("length-note").textContent =
    "Loss by position range of a quarter context, mean over seeds and documents with 95 % intervals over documents. The vertical line is the training context." +
    (without.length ? ` The method does not apply to ${without.join(", ")}.` : "") +
    " Learned positions end with the context; no method extends them.";
  const edge = data.about.context;
  plot("length", traces, { xaxis: { type: "log", title: { text: "position (bytes)" } }, yaxis: { title: { text: "loss (nats/byte)" } }, shapes: [{ type: "line", x0: edge, x1: edge, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1, color: isDark() ? "#b3b3bf" : "#55555e" } }] });
}
function drawPerturb() {
  const kind = by("kind").value;
  const traces = shown().flatMap((one) => (one.perturbed[kind] ? lines(one, one.perturbed[kind].x.map((x) => 100 * x), one.perturbed[kind]) : []));
  plot("perturb", traces, { xaxis: { title: { text: "% perturbed" } }, yaxis: { title: { text: "increase (nats/byte)" } } });
}
function drawResidual() {
  const traces = shown().flatMap((one) => (one.residual ? lines(one, one.residual.x, one.residual) : []));
  plot("residual", traces, { xaxis: { title: { text: "λ: 1 is the model, 0 is additive" } }, yaxis: { title: { text: "loss (nats/byte)" } } });
}

// ---- 6. relations
function drawRelation() {
  const x = by("x").value;
  const y = by("y").value;
  const traces = shown().map((one) => {
    const points = data.ends.filter((end) => end.encoding === one.name && end[x] !== null && end[y] !== null);
    return { x: points.map((p) => p[x]), y: points.map((p) => p[y]), name: one.name, mode: "markers+text", text: points.map(() => one.name), textposition: "top center", marker: { size: 11, color: COLOURS[one.index % COLOURS.length], symbol: MARKS[one.index % MARKS.length] }, hovertemplate: `${one.name}: %{x:.3f}, %{y:.3f}<extra></extra>` };
  });
  plot("relation", traces, { xaxis: { title: { text: data.additivity[x] } }, yaxis: { title: { text: data.tolerance[y] } } });
  const found = data.relations.find((one) => one.x === x && one.y === y);
  by("relation-note").textContent = found.rho === null ? "Too few encodings for a correlation."
    : `Spearman's ρ = ${fixed(found.rho, 2)} (95 % ${fixed(found.low, 2)} to ${fixed(found.high, 2)}, bootstrap over encodings), p = ${fixed(found.p, 2)} (permutation test), n = ${found.n} encodings, means over seeds. With this few encodings only a nearly perfect order is significant.`;
}
function fillRelations() {
  const table = by("relation-table");
  const head = make(make(table, "thead"), "tr");
  make(head, "th", "robustness");
  for (const name of Object.values(data.additivity)) make(head, "th", name, { scope: "col" });
  const body = make(table, "tbody");
  for (const [y, name] of Object.entries(data.tolerance)) {
    const row = make(body, "tr");
    make(row, "th", name, { scope: "row" });
    for (const x of Object.keys(data.additivity)) {
      const one = data.relations.find((r) => r.x === x && r.y === y);
      make(row, "td", one.rho === null ? "too few" : `${fixed(one.rho, 2)} (${fixed(one.low, 2)} to ${fixed(one.high, 2)}), p = ${fixed(one.p, 2)}, n = ${one.n}`);
    }
  }
}

function drawAll() {
  drawTime(); drawWhen(); drawLength(); drawPerturb(); drawResidual(); drawRelation();
}

const a = data.about;
by("about").textContent =
  `${data.encodings.length} encodings of the same language model of ${(a.parameters / 1e6).toFixed(1)} million parameters on the bytes of ${a.text}: ` +
  `context ${a.context}, ${a.steps.toLocaleString("en")} steps, seeds ${a.seeds.join(", ")}, the same data in the same order, on ${a.device}. ` +
  `Recording took at most ${fixed(100 * (a.recording || 0), 0)} % of the training time.`;
data.encodings.forEach((one, index) => {
  const label = make(by("legend"), "label");
  const box = make(label, "input", null, { type: "checkbox", checked: "" });
  make(label, "span", null, { class: "swatch", style: `background: ${COLOURS[index % COLOURS.length]}`, "aria-hidden": "true" });
  make(label, "span", one.name);
  box.addEventListener("change", () => { if (box.checked) hidden.delete(one.name); else hidden.add(one.name); drawAll(); });
});
for (const panel of data.panels) { make(by("readings"), "dt", panel.title); make(by("readings"), "dd", panel.reading); }
choices("method", methods.map((name) => [name, name]), drawLength);
choices("kind", Object.entries(data.kinds), drawPerturb);
choices("x", Object.entries(data.additivity), drawRelation);
choices("y", Object.entries(data.tolerance), drawRelation);
fillRelations();
writeRuns(data.runs);
startTheme(drawAll);
drawAll();
document.documentElement.dataset.ready = "true";
