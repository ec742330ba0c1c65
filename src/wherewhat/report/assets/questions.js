// Questions of a reader, each with a link to the view that answers it.
const isMeasured = (id) => data.metrics.some((metric) => metric.id === id);
const viewLink = (section, parts) => `#${section}?${new URLSearchParams({ ...(all.models.length > 1 ? { model: data.model.name } : {}), ...parts })}`;
// Names of the heads with a role, strongest first.
function withRole(role) {
  const metric = data.metrics.find(({ id }) => id === data.roles?.metrics[role]);
  const listed = rows.filter((row) => row.roles.includes(role)).map(({ l, h }) => ({ name: headName(l, h), value: metric ? ownValue(metric, l, h) : null }));
  return listed.sort((x, y) => y.value - x.value).map(({ name }) => name);
}
// All heads with a role, strongest first; where none has it, all heads in the order of its metric.
function roleLink(role) {
  const metric = data.roles.metrics[role];
  return viewLink("heads", { ...(withRole(role).length ? { label: role } : {}), metric, order: `-${{ s_pos_no_sink: "s_pos", s_sym_no_sink: "s_sym" }[metric] ?? metric}` });
}
function roleAnswer(role) {
  const names = withRole(role);
  return names.length ? `${plural(names.length, "head")}: ${names.slice(0, 4).join(", ")}${names.length > 4 ? ", …" : ""}` : "no head clearly";
}
// The heads by the cost of their removal, with the least one chosen so that the table shows it.
function cheapest() {
  const metric = data.metrics.find(({ id }) => id === "removal_loss");
  const costs = rows.map(({ l, h }) => ({ name: headName(l, h), cost: ownValue(metric, l, h) })).filter(({ cost }) => cost !== null);
  const least = costs.reduce((x, y) => (y.cost < x.cost ? y : x), costs[0]);
  const some = costs.length < rows.length ? `, of the ${plural(costs.length, "head")} that were removed` : "";
  return least && [viewLink("heads", { head: least.name, metric: metric.id, order: metric.id }), `those whose removal costs least${some}`];
}
// Question, link and short answer; those without a link were not measured.
function questions() {
  const head = headName(...tellingHead());
  const [first, second] = rows.slice(0, 2).map(({ l, h }) => headName(l, h));
  const dropped = isMeasured("removal_loss")
    ? cheapest()
    : data.roles && [roleLink("sink"), `candidates: ${roleAnswer("sink")} attend mostly to the first token; the cost of removal was not measured`];
  const role = (name) => data.roles && isMeasured(data.roles.metrics[name]) && [roleLink(name), roleAnswer(name)];
  return [
    ["Which heads do induction?", role("induction")],
    ["Which heads attend to the previous token?", role("previous token")],
    ["Which heads depend on position alone?", role("positional")],
    ["Which heads depend on content alone?", role("symbolic")],
    [`What does ${head} do?`, [`#${head}`, portraitOf(...tellingHead())?.portrait.split(":")[0] ?? ""]],
    ["Which heads can I drop?", dropped],
    ["Is r high because of training?", isMeasured("r") && [viewLink("heads", { metric: "r" }), "compare it with the control models below the map"]],
    ["Where in the model are the attention sinks?", isMeasured("sink_mass") && [viewLink("heads", { metric: "sink_mass" }), roleAnswer("sink")]],
    ["How do two heads differ?", second && [viewLink("panel", { head: first, beside: second }), `as an example ${first} and ${second}`]],
    ["Does word order matter to the model?", data.perturbation && ["#perturbation", "loss with shuffled words"]],
    ["What happens beyond the trained length?", data.lengths && ["#length", "loss by position"]],
    ["How can I make this page myself?", all.command && ["#method-section", "one command"]],
  ].filter(([, answer]) => answer);
}
function writeQuestions() {
  by("questions").replaceChildren();
  for (const [question, [href, answer]] of questions()) {
    const line = make(by("questions"), "li");
    make(line, "a", question, { href });
    line.append(answer ? ` ${answer}` : "");
  }
}
