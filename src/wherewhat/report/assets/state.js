// The view in the fragment of the URL, as in #heads?head=L12H3&metric=r, so that a link opens the same view.
const headName = (l, h) => `L${data.model.layers[l]}H${h}`;
const fragment = () => {
  const [section, query] = location.hash.slice(1).split("?");
  return { section, query };
};
function viewQuery(layer = chosen.layer, head = chosen.head) {
  const metric = data.metrics[chosen.metric];
  const named = {
    model: all.models.length > 1 ? data.model.name : "",
    head: headName(layer, head),
    metric: metric ? metric.id : "",
    weights: chosen.weights === data.model.weights ? "" : chosen.weights,
    keys: data.swaps ? chosen.keys : "",
    label: [...chosen.labels].join(","),
    search: chosen.search,
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
  saving = setTimeout(() => {
    try {
      history.replaceState({ saved: true }, "", `#${fragment().section}?${viewQuery()}`);
    } catch {
      // The address of an embedded page cannot be changed.
    }
  }, 200);
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
  const head = /^L(\d{1,6})H(\d{1,6})$/.exec(asked.get("head"));
  const layer = head ? data.model.layers.indexOf(+head[1]) : -1;
  if (layer >= 0 && +head[2] < data.model.heads[layer]) [chosen.layer, chosen.head] = [layer, +head[2]];
  chosen.keys = data.swaps && asked.get("keys") === "all" ? "all" : "";
  const labels = data.swaps ? swapsOf(data).labels : [];
  chosen.labels = new Set((asked.get("label") ?? "").split(",").filter((name) => labels.includes(name)));
  chosen.search = (asked.get("search") ?? "").slice(0, 100);
  if (Object.hasOwn(VIEWS, asked.get("view"))) chosen.view = asked.get("view");
  const number = /^\d{1,6}$/.test(asked.get("document")) ? +asked.get("document") : 1;
  chosen.document = number >= 1 && number <= data.texts.length ? number - 1 : 0;
  if (["dark", "light"].includes(asked.get("theme"))) chosen.theme = asked.get("theme");
}
// Entries of the history that were saved keep their place on the page; a new one leads to its section, and so does Tab.
function showSection() {
  const place = history.state?.saved ? null : by(fragment().section);
  place?.scrollIntoView();
  place?.focus({ preventScroll: true });
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
