// The panel of one head.
let waiting = 0;
// The matrix at once, the charts below it after a pause, so that heads can be walked through quickly.
function redrawPanel() {
  redraw("matrix");
  clearTimeout(waiting);
  waiting = setTimeout(() => redraw("curve", "planes", "place"), 60);
}
function drawCurve() {
  if (!record().mean) return void Plotly.purge(by("curve"));
  const { mean, half, documents } = record();
  const [middle, reach, away] = [unpack(mean), half && unpack(half), unpack(documents[fitted()].a)];
  const x = data.distances.slice(0, middle.length);
  const y = middle.map((value, d) => (value === null || away[d] === null ? null : value + away[d]));
  const bound = (sign) => middle.map((value, d) => (value === null || reach[d] === null ? null : value + sign * reach[d]));
  const { data: [thin, below, above, line], layout } = modelCharts().curve;
  const traces = [{ ...thin, x, y, name: plain(data.texts[fitted()].document) }];
  if (reach) {
    const [low, high] = [bound(-1), bound(1)];
    traces.push({ ...below, x, y: low }, { ...above, x, y: high }, { ...line, x, y: middle, meta: { low, high } });
  }
  draw("curve", { data: traces, layout });
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
const scoreOf = (name) => swapsOf(data)[name][chosen.layer][chosen.head];
const isScored = () => Boolean(data.swaps && swapsOf(data).s_pos[chosen.layer] && scoreOf("s_pos") !== null);
function label() {
  if (!isScored()) return "Its positional and symbolic scores were not measured.";
  const { gamma, sink_threshold, sink_tokens } = data.swaps;
  const [name, low, high] = [labelOf(chosen.layer, chosen.head) || "undefined", gamma, +(1 - gamma).toFixed(4)];
  const first = sink_tokens === 1 ? "the first token" : `the first ${sink_tokens} tokens`;
  const mass = data.metrics.find((metric) => metric.id === "sink_mass");
  const why = {
    sink: `it gives ${mass ? fixed(ownValue(mass, chosen.layer, chosen.head)) : "much"} of its attention to ${first}, at least ${sink_threshold} more than uniform attention would`,
    positional: `its positional score is at least ${high} and its symbolic score at most ${low}`,
    symbolic: `its symbolic score is at least ${high} and its positional score at most ${low}`,
    uniform: `both scores are at least ${high}: its attention is uniform`,
    mixed: `neither score is at least ${high} with the other at most ${low}`,
  }[name];
  const reach = (which) => (scoreOf(`${which}_low`) === null ? "" : ` (${fixed(scoreOf(`${which}_low`))} to ${fixed(scoreOf(`${which}_high`))})`);
  const score = (which) => `${fixed(scoreOf(which))}${reach(which)}`;
  const [agreeing, documents] = swapsOf(data).votes[chosen.layer][chosen.head];
  const alone = documents > 1 ? ` ${agreeing} of ${documents} documents alone give the same label.` : "";
  return `Label${documents > 1 ? " over all documents" : ""}: ${name}${why ? `, because ${why}` : ""}.${alone} Positional ${score("s_pos")}, symbolic ${score("s_sym")} over ${chosen.keys === "all" ? "all keys" : `the keys after ${first}`}.`;
}
function drawPlace() {
  if (!isScored()) return void Plotly.purge(by("place"));
  const { data: [others, star], layout } = modelCharts().place;
  const [{ x, y, text, marker: { symbol } }] = planeChart(chosen.model).data;
  // One query of one document has no interval.
  const reach = (name) => ({ visible: scoreOf(`${name}_low`) !== null, array: [scoreOf(`${name}_high`) - scoreOf(name)], arrayminus: [scoreOf(name) - scoreOf(`${name}_low`)] });
  const [error_x, error_y] = ["s_pos", "s_sym"].map((name, i) => ({ ...star[i ? "error_y" : "error_x"], ...reach(name) }));
  draw("place", { data: [{ ...others, x, y, text, marker: { ...others.marker, symbol } }, { ...star, x: [scoreOf("s_pos")], y: [scoreOf("s_sym")], error_x, error_y }], layout });
}
// The panel is always of the model itself; the map may show a control model.
function writePanelWeights() {
  const [metric, own] = [data.metrics[chosen.metric], data.model.weights];
  const value = metric?.values[chosen.weights]?.[chosen.layer]?.[chosen.head];
  by("panel-weights").textContent = chosen.weights === own ? "" : `This panel shows the ${own} model. On the map, which shows ${chosen.weights} weights, ${metric.title} of this head is ${inWords(metric, value)}.`;
}
function writePanel() {
  writePanelWeights();
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
    : `Mean over ${documents} documents of ${tokens} tokens with its 95 % interval over documents; thin: ${data.texts[fitted()].document} alone.`;
  const of = (name) => (sizeOf(name) ? `On ${sizeOf(name)}.` : "");
  by("planes-note").textContent = of(record().share ? "planes" : "heads");
  by("place-note").textContent = [isScored() ? "The star is this head." : "", sinkMarks(), of("heads")].filter(Boolean).join(" ");
}
// Links to the nearest heads, which open without another entry in the history.
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
  by("all-numbers").addEventListener("toggle", writeNumbers);
  chart("curve", drawCurve);
  chart("planes", drawPlanes, { numbers: numbersOfPlanes });
  chart("place", drawPlace);
}
