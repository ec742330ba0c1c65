// The panel of one head.
let waiting = 0;
// The matrix at once, the charts below it after a pause, so that heads can be walked through quickly.
function redrawPanel() {
  redraw("matrix");
  clearTimeout(waiting);
  waiting = setTimeout(() => redraw("curve", "planes", "place"), 60);
}
// Mean distance curve of a head with the chosen weights, and of the model itself that of the chosen document.
function curveLines(l, h) {
  const isOwn = chosen.weights === data.model.weights;
  const { mean, half, documents } = isOwn ? record(l, h) : data.control_curves[chosen.weights]?.[l]?.[h] ?? {};
  if (!mean) return null;
  const [middle, reach, away] = [unpack(mean), half && unpack(half), isOwn && unpack(documents[fitted()].a)];
  const bound = (sign) => middle.map((value, d) => (value === null || reach[d] === null ? null : value + sign * reach[d]));
  return {
    x: data.distances.slice(0, middle.length),
    middle,
    own: away && middle.map((value, d) => (value === null || away[d] === null ? null : value + away[d])),
    ...(reach ? { low: bound(-1), high: bound(1) } : {}),
  };
}
function drawCurve() {
  const lines = curveLines(chosen.layer, chosen.head);
  if (!lines) return void Plotly.purge(by("curve"));
  const { x, middle, own, low, high } = lines;
  const { data: [thin, below, above, line], layout } = modelCharts().curve;
  const traces = own ? [{ ...thin, x, y: own, name: plain(data.texts[fitted()].document) }] : [];
  if (low) traces.push({ ...below, x, y: low }, { ...above, x, y: high }, { ...line, x, y: middle, meta: { low, high } });
  else if (!own) traces.push({ ...thin, x, y: middle, name: plain(chosen.weights) });
  const beside = chosen.beside && curveLines(...chosen.beside);
  if (beside) traces.push({ ...thin, x: beside.x, y: beside.middle, name: headName(...chosen.beside), line: { color: "#d6277b", width: 2, dash: "dash" } });
  draw("curve", { data: traces, layout: { ...layout, showlegend: traces.length > 1 } });
}
function drawPlanes() {
  const packed = record();
  const name = packed.share ? "share" : "use";
  if (!packed[name] || !data.turns[chosen.layer]) return void Plotly.purge(by("planes"));
  const charts = modelCharts().planes;
  const { data: [bars], layout } = charts[charts[chosen.layer]] ?? charts[chosen.layer];
  const [y, pos, sym] = [name, "plane_pos", "plane_sym"].map((key) => packed[key] && unpack(packed[key]));
  const text = y.map((_, p) => (pos && pos[p] !== null ? `<br>alone: positional ${pos[p].toFixed(2)}, symbolic ${sym[p].toFixed(2)}` : ""));
  draw("planes", { data: [{ ...bars, y, text }], layout });
}
function numbersOfPlanes() {
  const name = record().share ? "share" : "use";
  const turns = data.turns[chosen.layer];
  return [["plane", "period in tokens", name], ...unpack(record()[name]).map((x, p) => [p + 1, turns[p] ? 1 / turns[p] : null, x])];
}
const scoreOf = (name) => chosenSwaps()[name][chosen.layer][chosen.head];
const isScored = () => Boolean(chosenSwaps()?.s_pos[chosen.layer] && scoreOf("s_pos") !== null);
function label() {
  if (!isScored()) return "Its positional and symbolic scores were not measured.";
  const { gamma, sink_threshold, sink_tokens } = data.swaps;
  const [name, low, high] = [labelIn(chosenSwaps(), chosen.layer, chosen.head) || "undefined", gamma, +(1 - gamma).toFixed(4)];
  const first = sink_tokens === 1 ? "the first token" : `the first ${sink_tokens} tokens`;
  const mass = data.metrics.find((metric) => metric.id === "sink_mass");
  const why = {
    sink: `it gives ${mass ? fixed(mass.values[chosen.weights]?.[chosen.layer]?.[chosen.head]) : "much"} of its attention to ${first}, at least ${sink_threshold} more than uniform attention would`,
    positional: `its positional score is at least ${high} and its symbolic score at most ${low}`,
    symbolic: `its symbolic score is at least ${high} and its positional score at most ${low}`,
    uniform: `both scores are at least ${high}: its attention is uniform`,
    mixed: `neither score is at least ${high} with the other at most ${low}`,
  }[name];
  const reach = (which) => (scoreOf(`${which}_low`) === null ? "" : ` (${fixed(scoreOf(`${which}_low`))} to ${fixed(scoreOf(`${which}_high`))})`);
  const score = (which) => `${fixed(scoreOf(which))}${reach(which)}`;
  const [agreeing, documents] = chosenSwaps().votes[chosen.layer][chosen.head];
  const alone = documents > 1 ? ` ${agreeing} of ${documents} documents alone give the same label.` : "";
  return `Label${documents > 1 ? " over all documents" : ""}: ${name}${why ? `, because ${why}` : ""}.${alone} Positional ${score("s_pos")}, symbolic ${score("s_sym")} over ${chosen.keys === "all" ? "all keys" : `the keys after ${first}`}.`;
}
function drawPlace() {
  if (!isScored()) return void Plotly.purge(by("place"));
  const { data: [others, star], layout } = modelCharts().place;
  const { s_pos, s_sym } = chosenSwaps();
  const [x, y] = [s_pos, s_sym].map(defined);
  const heads = s_pos.flatMap((row, l) => (row ?? []).map((value, h) => ({ value, l, h }))).filter(({ value }) => value !== null);
  const labels = heads.map(({ l, h }) => labelIn(chosenSwaps(), l, h));
  const text = heads.map(({ l, h }, i) => `layer ${data.model.layers[l]}, head ${h}: ${labels[i]}`);
  const symbol = labels.map((name) => (name === "sink" ? "diamond-open" : "circle"));
  // One query of one document has no interval.
  const reach = (name) => ({ visible: scoreOf(`${name}_low`) !== null, array: [scoreOf(`${name}_high`) - scoreOf(name)], arrayminus: [scoreOf(name) - scoreOf(`${name}_low`)] });
  const [error_x, error_y] = ["s_pos", "s_sym"].map((name, i) => ({ ...star[i ? "error_y" : "error_x"], ...reach(name) }));
  draw("place", { data: [{ ...others, x, y, text, marker: { ...others.marker, symbol } }, { ...star, x: [scoreOf("s_pos")], y: [scoreOf("s_sym")], error_x, error_y }], layout });
}
// Patterns and logits are stored for the model itself; all else follows the chosen weights.
function writePanelWeights() {
  const own = data.model.weights;
  by("panel-weights").textContent = chosen.weights === own ? "" : `Roles, label, scores and distance curve are of one ${chosen.weights} control; the matrix, the text and the planes are of the ${own} model.`;
}
// The head in one sentence, and its roles, each of which shows the heads that have it.
function writePortrait() {
  const missing = data.roles && !data.roles.heads[chosen.weights] ? `Its roles were not measured with ${chosen.weights} weights.` : "";
  const { portrait = missing, roles = [] } = portraitOf(chosen.layer, chosen.head, chosen.weights) ?? {};
  by("portrait").textContent = portrait;
  by("roles").replaceChildren();
  for (const role of roles) {
    const place = make(by("roles"), "li");
    make(place, "a", role, { href: `#heads?${new URLSearchParams({ ...Object.fromEntries(new URLSearchParams(viewQuery())), label: role })}`, title: `Show all heads with the role ${role}` });
  }
}
// The head that stays beside the chosen one, or null.
function compareWith(head) {
  chosen.beside = head;
  writePanel();
  redraw("matrix", "curve");
  saveView();
}
function writeBeside() {
  by("pair").classList.toggle("two", Boolean(chosen.beside));
  by("beside").hidden = !chosen.beside;
  by("keep").textContent = chosen.beside ? "Remove the head beside" : "Keep this head beside another";
  if (!chosen.beside) return;
  by("h-beside").textContent = headName(...chosen.beside);
  by("beside-portrait").textContent = portraitOf(...chosen.beside, chosen.weights)?.portrait ?? "";
}
function writePanel() {
  writePanelWeights();
  writePortrait();
  writeBeside();
  by("h-panel").textContent = `Layer ${data.model.layers[chosen.layer]}, head ${chosen.head}`;
  by("layer").value = chosen.layer;
  by("head").value = chosen.head;
  by("label").textContent = label();
  writeView();
  writeText();
  writeNotes();
  writeLike();
  if (by("all-numbers").open) writeNumbers();
}
// Documents, tokens and queries of each chart.
function writeNotes() {
  const { documents, tokens } = data.sizes.axes ?? {};
  by("curve-note").textContent = !documents ? "Not measured." : documents === 1
    ? `Of one document of ${tokens} tokens, ${data.texts[fitted()].document}.`
    : `Mean over ${documents} documents of ${tokens} tokens with its 95 % interval over documents${chosen.weights === data.model.weights ? `; thin: ${data.texts[fitted()].document} alone` : ""}.`;
  const of = (name) => (sizeOf(name) ? `On ${sizeOf(name)}.` : "");
  by("planes-note").textContent = of(record().share ? "planes" : "heads");
  by("place-note").textContent = [isScored() ? "The star is this head." : "", sinkMarks(), of("heads")].filter(Boolean).join(" ");
}
// Links to the nearest heads.
function writeLike() {
  by("like").replaceChildren();
  const neighbours = nearestHeads();
  for (const { l, h, away } of neighbours) {
    const line = make(by("like"), "li");
    const link = make(line, "a", headName(l, h), { href: `#heads?${viewQuery(l, h)}` });
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      choose(l, h);
    });
    line.append(`${labelOf(l, h) ? `, ${labelOf(l, h)}` : ""}: ${away.toFixed(2)} away`);
  }
  by("like-note").textContent = neighbours.length
    ? `Nearest by root-mean-square difference of ${comparable.names.join(", ")}, each in standard deviations over heads.`
    : "No other head has enough of the same metrics.";
}
function writeNumbers() {
  const rows = data.metrics.map((metric) => {
    const names = Object.keys(metric.values);
    const value = (weights) => (metric.values[weights] && metric.values[weights][chosen.layer] ? inWords(metric, metric.values[weights][chosen.layer][chosen.head]) : "");
    return [termLink(document.createDocumentFragment(), metric.title, metric.id), ...WEIGHTS.map((weights) => (names.includes(weights) ? value(weights) : ""))];
  });
  table(by("numbers-of-head"), ["metric", ...WEIGHTS.map((weights) => (weights === data.model.weights ? weights : `one ${weights} control`))], rows);
}
const WEIGHTS = ["trained", "random", "shuffled"];
function startPanel() {
  startMatrix();
  startText();
  by("keep").addEventListener("click", () => compareWith(chosen.beside ? null : [chosen.layer, chosen.head]));
  by("all-numbers").addEventListener("toggle", writeNumbers);
  chart("curve", drawCurve);
  chart("planes", drawPlanes, { numbers: numbersOfPlanes });
  chart("place", drawPlace);
}
