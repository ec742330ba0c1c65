// The view in the fragment of the URL, as in #heads?head=L12H3&metric=r, so that a link opens the same view.
const headName = (l, h) => `L${data.model.layers[l]}H${h}`;
const HEAD = /^L(\d{1,6})H(\d{1,6})$/i;
// The fragment #L12H3 is short for the panel of that head.
const fragment = () => {
  const [section, query] = location.hash.slice(1).split("?");
  return HEAD.test(section) && query === undefined ? { section: "panel", query: `head=${section}` } : { section, query };
};
// Layer and head with a name such as L12H3; null if there is none.
function headNamed(name) {
  const parts = HEAD.exec(name ?? "");
  const layer = parts ? data.model.layers.indexOf(+parts[1]) : -1;
  return layer >= 0 && +parts[2] < data.model.heads[layer] ? [layer, +parts[2]] : null;
}
function viewQuery(layer = chosen.layer, head = chosen.head) {
  const metric = data.metrics[chosen.metric];
  const named = {
    model: all.models.length > 1 ? data.model.name : "",
    head: headName(layer, head),
    beside: chosen.beside ? headName(...chosen.beside) : "",
    metric: metric ? metric.id : "",
    weights: chosen.weights === data.model.weights ? "" : chosen.weights,
    keys: data.swaps ? chosen.keys : "",
    label: [...chosen.labels].join(","),
    search: chosen.search,
    order: chosen.order.id === "head" && !chosen.order.down ? "" : `${chosen.order.down ? "-" : ""}${chosen.order.id}`,
    view: chosen.view,
    document: chosen.document ? chosen.document + 1 : "",
    theme: chosen.theme,
  };
  return new URLSearchParams(Object.entries(named).filter(([, value]) => value)).toString().replaceAll("%2C", ",");
}
let saving = 0;
// After a pause: browsers limit how often a page may change its address.
function saveView() {
  clearTimeout(saving);
  const before = location.hash;
  saving = setTimeout(() => {
    if (location.hash === before) saveNow(); // Else a link was followed in the meantime: its view is opened next.
  }, 200);
}
// Another head is another entry of the history.
function saveNow() {
  clearTimeout(saving);
  const head = `${chosen.model} ${headName(chosen.layer, chosen.head)}`;
  const isOther = history.state?.saved && history.state.saved !== head;
  try {
    history[isOther ? "pushState" : "replaceState"]({ saved: head }, "", `#${fragment().section}?${viewQuery()}`);
  } catch {
    // The address of an embedded page cannot be changed.
  }
}
// Set what the fragment names and exists; other values are ignored. A filter that is not named is removed.
function readView() {
  const { query } = fragment();
  if (query === undefined) return;
  const asked = new URLSearchParams(query);
  const model = all.models.findIndex(({ model: { name } }) => name === asked.get("model"));
  if (model >= 0 && model !== chosen.model) setModel(model);
  const metric = data.metrics.findIndex(({ id }) => id === asked.get("metric"));
  if (metric >= 0) chosen.metric = metric;
  if (metric >= 0 || asked.has("weights")) {
    const weights = Object.keys(data.metrics[chosen.metric]?.values ?? {});
    chosen.weights = weights.includes(asked.get("weights")) ? asked.get("weights") : data.model.weights;
  }
  [chosen.layer, chosen.head] = headNamed(asked.get("head")) ?? [chosen.layer, chosen.head];
  chosen.beside = headNamed(asked.get("beside"));
  chosen.keys = data.swaps && asked.get("keys") === "all" ? "all" : "";
  chosen.labels = new Set((asked.get("label") ?? "").split(",").filter((name) => knownRoles().includes(name)));
  chosen.search = (asked.get("search") ?? "").slice(0, 100);
  const [, down, column] = /^(-?)(\w{1,100})$/.exec(asked.get("order") ?? "") ?? [];
  chosen.order = { id: column ?? "head", down: down === "-" };
  if (Object.hasOwn(VIEWS, asked.get("view"))) chosen.view = asked.get("view");
  const number = /^\d{1,6}$/.test(asked.get("document")) ? +asked.get("document") : 1;
  chosen.document = number >= 1 && number <= data.texts.length ? number - 1 : 0;
  if (["dark", "light"].includes(asked.get("theme"))) chosen.theme = asked.get("theme");
}
// Entries of the history that were saved keep their place on the page; a new one leads to its section, and so does Tab.
function showSection() {
  const place = history.state?.saved ? null : by(fragment().section);
  unfold(place);
  place?.scrollIntoView();
  place?.focus({ preventScroll: true });
}
// Open what an element is folded into, and its own fold.
function unfold(place) {
  for (let at = place?.querySelector(":scope > details.fold") ?? place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
}
function openView() {
  // A link to a section or term changes nothing else.
  if (fragment().query === undefined) {
    showSection();
    return void saveView();
  }
  readView();
  setTheme();
  write();
  redrawAll();
  showSection();
}
function setTheme() {
  setDark(chosen.theme ? chosen.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
}
// Follow the button of the theme and the address.
function listenToView() {
  by("theme").addEventListener("click", () => {
    chosen.theme = isDark() ? "light" : "dark";
    setTheme();
    redrawAll();
    saveView();
  });
  addEventListener("hashchange", openView);
}
