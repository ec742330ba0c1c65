// 1. The model in a paragraph and headline numbers.
function count(parameters) {
  if (parameters >= 1e9) return `${(parameters / 1e9).toFixed(1)} billion`;
  return parameters >= 1e6 ? `${(parameters / 1e6).toFixed(0)} million` : String(parameters);
}
// Controls beneath the value that they belong to.
function listControls(place, controls, value) {
  const own = controls.filter((control) => !control.of || control.of === value.name);
  if (!own.length) return;
  const list = make(place, "ul", null, { class: "controls-list", "aria-label": "to compare with" });
  for (const control of own) make(list, "li", `${control.of ? control.name.slice(0, -control.of.length - 2) : control.name}: ${withInterval(control)}`);
}
function card(number) {
  const item = make(by("numbers"), "li");
  termLink(make(item, "h3"), number.title, number.metrics[0]);
  for (const value of number.values) {
    const line = make(item, "div");
    // A number of heads comes before those of single documents.
    const [first, ...share] = withInterval(value).split("; ");
    const [mean, ...reach] = first.split(" ");
    make(line, "span", mean, { class: "big" });
    make(line, "span", ` ${[[...reach, value.name].join(" "), ...share].join("; ")}`);
    listControls(item, number.controls, value);
  }
  if (number.kinds.length) {
    make(item, "div", "By kind of layer:", { class: "note" });
    const kinds = make(item, "ul", null, { class: "controls-list", "aria-label": "by kind of layer" });
    for (const value of number.kinds) make(kinds, "li", `${value.name}: ${withInterval(value)}`);
  }
  make(item, "div", `${number.reading} On ${sizeOf(number.measurement)}.`, { class: "note" });
  if (number.price) make(item, "p", number.price);
}
// A finding leads to its section, with its metric or labels chosen by the fragment.
function writeFindings() {
  by("findings").hidden = !data.findings.length;
  by("findings-list").replaceChildren();
  for (const finding of data.findings) {
    const line = make(by("findings-list"), "li", `${finding.short} `, { title: finding.text });
    make(line, "a", "show", { href: `#${finding.link}`, "aria-label": `Show the evidence: ${finding.short}` });
  }
  by("findings-in-full").replaceChildren();
  for (const { text } of [data.summary, ...data.findings].filter(Boolean)) make(by("findings-in-full"), "li", text);
}
// The control models that were measured, in words.
function aboutControls() {
  const words = {
    random: "the same architecture with newly initialised weights (random)",
    shuffled: "the model with the entries of its query and key weights permuted (shuffled)",
  };
  const measured = Object.keys(words).filter((weights) => data.metrics.some(({ values }) => weights in values));
  if (!measured.length) return "";
  const said = measured.map((weights) => words[weights]);
  const random = measured.includes("random") ? ": an interval of the random control is over documents, one untrained model" : "";
  return said.length > 1
    ? `Its control models are ${said.join(", and ")}. Each is one draw${random}. `
    : `Its control model is ${said[0]}. It is one draw${random}. `;
}
function writeModel() {
  const m = data.model;
  const others = m.unmeasured.length;
  const names = all.models.map((model) => model.model.name);
  by("name").textContent = names.length > 2 ? names.join(", ") : names.join(" and ");
  document.title = `${names.join(", ")}: where and what`;
  const kinds = Object.entries(m.kinds).map(([kind, layers]) => `${plural(layers.length, "layer")}: ${kind}`).join("; ");
  const controls = m.weights === "trained"
    ? aboutControls()
    : `These are not trained weights but the ${m.weights} control of a model. `;
  by("about").textContent =
    `${isolated(m.name)} is a ${m.type} model with ${count(m.parameters)} parameters: ${others ? `attention in ${m.layers.length} of ${plural(m.layers.length + others, "layer")}, each` : plural(m.layers.length, "layer")} of ${plural(Math.max(...m.heads), "attention head")} ` +
    `(${plural(m.kv_heads.length > 1 ? m.kv_heads.join(" or ") : m.kv_heads[0], "key head")})${m.positions ? `, with up to ${m.positions} positions` : ""}. ` +
    `${kinds ? `Its layers are of several kinds (${kinds}). ` : ""}` +
    `It was measured in ${m.dtype} on ${plural(m.documents, "document")} of ${m.tokens} tokens ` +
    `of ${m.embedded ? "the embedded English prose" : "the given text"}. ${controls}Intervals are 95 % over documents.` +
    (data.left_out.length ? " Some runs were left out; the section on method lists them with reasons." : "");
  by("numbers").replaceChildren();
  data.numbers.forEach(card);
}
