// The table of heads with its filter, which the map follows.
const COLUMNS = ["r", "unique_a", "unique_c", "previous_token", "induction", "sink_mass", "entropy"];
const labelIn = (swaps, l, h) => (swaps && swaps.label[l] ? swaps.codes[swaps.label[l][h]] ?? "" : "");
const labelOf = (l, h) => labelIn(data.swaps && swapsOf(data), l, h);
// Names by which heads are filtered: patterns such as induction, and the label of the chosen version.
const rolesOf = (l, h) => [...(portraitOf(l, h)?.roles.filter((role) => data.roles.patterns.includes(role)) ?? []), labelOf(l, h)].filter(Boolean);
const knownRoles = () => [...(data.roles?.patterns ?? []), ...(data.swaps ? swapsOf(data).labels : [])];
// The names of the two scores that are shown.
const shownScores = () => (chosen.keys === "all" ? ["s_pos", "s_sym"] : ["s_pos_no_sink", "s_sym_no_sink"]);
const ownValue = (metric, l, h) => metric.values[data.model.weights]?.[l]?.[h] ?? null;
// The value of a category is the index of its name.
const named = (metric, x) => (metric.categories.length && x !== null && x !== undefined ? metric.categories[x] : x);
const inWords = (metric, x) => (metric.categories.length ? named(metric, x) ?? "undefined" : show(x));
const brief = (x) => (Math.abs(x) >= 100 ? x.toFixed(1) : x.toFixed(3));
let rows = [];

// The head that a page opens on: the first that the overview shows, else that with the largest key share.
function tellingHead() {
  const [first] = data.telling.heads;
  if (first) return [first.layer, first.head];
  const key = data.metrics.find((metric) => metric.id === "unique_c");
  const heads = data.model.layers.flatMap((_, l) => Array.from({ length: data.model.heads[l] }, (_, h) => ({ l, h, share: key ? ownValue(key, l, h) : null })));
  const best = heads.reduce((most, head) => ((head.share ?? -Infinity) > (most.share ?? -Infinity) ? head : most));
  return [best.l, best.h];
}

// The metrics in which heads are compared, where they were measured.
const COMPARED = ["s_pos_no_sink", "s_sym_no_sink", "r", "unique_a", "unique_c", "sink_mass", "entropy"];
const NEIGHBOURS = 5;
// Each head with its metrics in standard deviations over heads.
function standardised() {
  const metrics = COMPARED.map((id) => data.metrics.find((metric) => metric.id === id)).filter(Boolean).map((metric) => {
    const values = defined(metric.values[data.model.weights]);
    const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
    const spread = Math.sqrt(values.reduce((sum, x) => sum + (x - mean) ** 2, 0) / values.length);
    return { metric, mean, spread };
  }).filter(({ spread }) => spread > 0);
  const point = (l, h) => metrics.map(({ metric, mean, spread }) => {
    const value = ownValue(metric, l, h);
    return value === null ? null : (value - mean) / spread;
  });
  return { names: metrics.map(({ metric }) => metric.title), points: rows.map(({ l, h }) => ({ l, h, at: point(l, h) })) };
}
let comparable = { names: [], points: [] };
// The heads with the least root-mean-square difference to the chosen one, over the metrics that both have.
function nearestHeads() {
  const own = comparable.points.find(({ l, h }) => l === chosen.layer && h === chosen.head)?.at ?? [];
  const distance = (at) => {
    const squares = at.map((x, k) => (x === null || own[k] === null ? null : (x - own[k]) ** 2)).filter((x) => x !== null);
    return squares.length * 2 > own.length ? Math.sqrt(squares.reduce((sum, x) => sum + x, 0) / squares.length) : Infinity;
  };
  return comparable.points
    .filter(({ l, h }) => l !== chosen.layer || h !== chosen.head)
    .map(({ l, h, at }) => ({ l, h, away: distance(at) }))
    .filter(({ away }) => away < Infinity)
    .sort((x, y) => x.away - y.away || x.l - y.l || x.h - y.h)
    .slice(0, NEIGHBOURS);
}
const joined = (name) => name.toLowerCase().replaceAll(" ", "_");
// The metric with that name, title or role, where spaces are underscores.
const metricNamed = (name) => {
  const role = data.roles && Object.keys(data.roles.metrics).find((role) => joined(role) === name);
  const own = (metric) => [metric.id.toLowerCase(), joined(metric.title)].includes(name);
  return data.metrics.find((metric) => metric.id === data.roles?.metrics[role]) ?? data.metrics.find(own);
};
const COMPARISONS = { ">": (x, y) => x > y, ">=": (x, y) => x >= y, "<": (x, y) => x < y, "<=": (x, y) => x <= y, "=": (x, y) => x === y };
// The test of one word of the search: L12H3 or 12.3, a layer, a head (H3), a condition (sink>0.5), or part of a role.
function testOf(word) {
  const head = /^h(\d+)$/.exec(word);
  if (head) return (row) => row.h === +head[1];
  const place = /^l?(\d+)(?:[h.](\d*))?$/.exec(word);
  if (place) return (row) => row.layer === +place[1] && (!place[2] || row.h === +place[2]);
  const condition = /^(.*?)([<>]=?|=)(-?\d*\.?\d+)$/.exec(word);
  if (!condition) return (row) => row.roles.some((role) => joined(role).includes(word));
  const metric = metricNamed(condition[1]);
  if (!metric) return () => false;
  return ({ l, h }) => ownValue(metric, l, h) !== null && COMPARISONS[condition[2]](ownValue(metric, l, h), +condition[3]);
}
// Spaces around a comparison and inside the name of a role or metric do not separate words.
function searchedWords() {
  const names = [...knownRoles(), ...data.metrics.map((metric) => metric.title)].map((name) => name.toLowerCase()).filter((name) => name.includes(" "));
  const text = chosen.search.toLowerCase().replace(/\s*([<>]=?|=)\s*/g, "$1");
  return names.sort((x, y) => y.length - x.length).reduce((words, name) => words.replaceAll(name, joined(name)), text).split(/\s+/).filter(Boolean);
}
const columnsOfTable = () => {
  const chosenMetric = data.metrics[chosen.metric];
  const listed = COLUMNS.map((id) => data.metrics.find((metric) => metric.id === id)).filter(Boolean);
  const metrics = chosenMetric && ![...shownScores(), ...COLUMNS].includes(chosenMetric.id) ? [chosenMetric, ...listed] : listed;
  const scores = [["positional", "s_pos"], ["symbolic", "s_sym"]].map(([title, name], i) => ({ id: name, title, reading: data.metrics.find((metric) => metric.id === shownScores()[i])?.reading ?? "", of: (l, h) => swapsOf(data)[name][l]?.[h] ?? null }));
  return [
    ...(data.swaps ? [{ id: "roles", title: "roles", of: (l, h) => rolesOf(l, h).join(", ") }, ...scores] : []),
    ...metrics.map((metric) => ({ id: metric.id, title: metric.title, reading: metric.reading, of: (l, h) => named(metric, ownValue(metric, l, h)) })),
  ];
};
function writeHeads() {
  const columns = columnsOfTable();
  const ids = ["head", ...columns.map(({ id }) => id)];
  const grid = document.createElement("table");
  grid.setAttribute("role", "grid");
  grid.setAttribute("aria-labelledby", "h-table");
  const top = make(make(grid, "thead"), "tr");
  [{ title: "head" }, ...columns].forEach(({ title, reading = "" }, i) => {
    make(make(top, "th", null, { scope: "col" }), "button", title, { type: "button", title: reading }).addEventListener("click", () => orderBy(ids, i));
  });
  const body = make(grid, "tbody");
  rows = data.model.layers.flatMap((layer, l) => Array.from({ length: data.model.heads[l] }, (_, h) => {
    const line = make(body, "tr", null, { tabindex: "-1", "aria-selected": "false" });
    make(line, "th", headName(l, h), { scope: "row" });
    const values = columns.map((column) => column.of(l, h));
    for (const value of values) make(line, "td", typeof value === "number" ? brief(value) : value);
    const row = { l, h, layer, roles: rolesOf(l, h), shown: true, keys: [1e6 * l + h, ...values], line };
    line.addEventListener("click", (event) => openHead(l, h, event));
    return row;
  }));
  body.addEventListener("keydown", walkTable);
  by("table-of-heads").replaceChildren(grid);
  comparable = standardised();
  writeChips();
  by("search").value = chosen.search;
  sortHeads(Math.max(0, ids.indexOf(chosen.order.id)));
  filterHeads();
  selectRow();
}
// A first click sorts numbers from the largest, text and heads from the first.
function orderBy(ids, column) {
  const isText = column === 0 || rows.some((row) => typeof row.keys[column] === "string");
  chosen.order = { id: ids[column], down: chosen.order.id === ids[column] ? !chosen.order.down : !isText };
  sortHeads(column);
  saveView();
}
// Undefined values are last.
function sortHeads(column) {
  const { down } = chosen.order;
  const sign = down ? -1 : 1;
  const missing = (row) => row.keys[column] === null || row.keys[column] === "";
  rows.sort((x, y) => missing(x) - missing(y) || sign * ((x.keys[column] > y.keys[column]) - (x.keys[column] < y.keys[column])) || x.keys[0] - y.keys[0]);
  const body = by("table-of-heads").querySelector("tbody");
  body.append(...rows.map((row) => row.line));
  layOut(0, STEP);
  by("table-of-heads").querySelectorAll("thead th").forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
}
function writeChips() {
  by("chips").replaceChildren();
  by("chips").hidden = by("keys-of-labels").hidden = !data.swaps;
  by("keys").value = chosen.keys;
  for (const name of knownRoles()) {
    const count = rows.filter((row) => row.roles.includes(name)).length;
    const chip = make(by("chips"), "button", `${name} ${count}`, { type: "button", "aria-pressed": String(chosen.labels.has(name)) });
    chip.addEventListener("click", () => {
      if (!chosen.labels.delete(name)) chosen.labels.add(name);
      chip.setAttribute("aria-pressed", String(chosen.labels.has(name)));
      filterHeads();
      redrawMapSoon();
    });
  }
}
let typing = 0;
function redrawMapSoon() {
  clearTimeout(typing);
  typing = setTimeout(() => redraw("map", "thumbnails"), 60);
}
function filterHeads() {
  const tests = searchedWords().map(testOf);
  for (const row of rows) row.shown = (!chosen.labels.size || row.roles.some((role) => chosen.labels.has(role))) && tests.every((test) => test(row));
  const count = rows.filter((row) => row.shown).length;
  layOut(0, STEP);
  by("shown").textContent = count === rows.length ? plural(count, "head") : `${count} of ${plural(rows.length, "head")}`;
  saveView();
}
// Of the heads that the filter shows, the table lays out some, and more when it is scrolled, so that it stays fast.
const STEP = 50;
let laid = { from: 0, to: STEP };
function layOut(from, to) {
  laid = { from: Math.max(0, from), to };
  const shown = new Set(rows.filter((row) => row.shown).slice(laid.from, to));
  for (const row of rows) if (row.line.hidden === shown.has(row)) row.line.hidden = !row.line.hidden;
}
function layOutAround(row) {
  if (!row.line.hidden) return;
  const at = rows.filter(({ shown }) => shown).indexOf(row);
  layOut(at - STEP / 2, at + STEP / 2);
}
function layOutMore() {
  const place = by("table-of-heads");
  const { scrollTop, scrollHeight, clientHeight } = place;
  if (scrollTop < clientHeight && laid.from > 0) {
    layOut(laid.from - STEP, laid.to);
    place.scrollTop = scrollTop + place.scrollHeight - scrollHeight;
  } else if (scrollTop + 2 * clientHeight > scrollHeight && laid.to < rows.length) {
    layOut(laid.from, laid.to + STEP);
  }
}
// The row of the chosen head is the one that Tab reaches.
function selectRow() {
  for (const row of rows) {
    const isChosen = row.l === chosen.layer && row.h === chosen.head;
    if (isChosen === (row.line.tabIndex === 0)) continue;
    row.line.setAttribute("aria-selected", String(isChosen));
    row.line.tabIndex = isChosen ? 0 : -1;
    if (isChosen && row.shown) reveal(row);
  }
}
function reveal(row) {
  layOutAround(row);
  const { line } = row;
  const place = by("table-of-heads");
  const [top, header] = [line.offsetTop, place.querySelector("thead").offsetHeight];
  if (top - header < place.scrollTop || top + line.offsetHeight > place.scrollTop + place.clientHeight) place.scrollTop = top - place.clientHeight / 2;
}
function walkTable(event) {
  const shown = rows.filter((row) => row.shown);
  const at = shown.findIndex((row) => row.line === event.target);
  if (at < 0) return;
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1, Enter: at, " ": at }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (to === at) openHead(shown[at].l, shown[at].h, event);
  else {
    const row = shown[Math.min(Math.max(to, 0), shown.length - 1)];
    layOutAround(row);
    row.line.focus();
  }
}
// The heads that the filter shows, with all their metrics.
function numbersOfHeads() {
  const versions = data.swaps ? [["_no_sink", data.swaps], ["", data.swaps.all_keys]] : [];
  const labels = versions.map(([ending, swaps]) => [`label${ending}`, (l, h) => labelIn(swaps, l, h)]);
  const scores = versions.flatMap(([ending, swaps]) => ["s_pos", "s_sym"].map((name) => [`${name}${ending}`, (l, h) => swaps[name][l]?.[h]]));
  const listed = scores.map(([name]) => name);
  const metrics = data.metrics.filter((metric) => !listed.includes(metric.id)).map((metric) => [metric.id, (l, h) => named(metric, ownValue(metric, l, h))]);
  const roles = data.roles ? [["roles", (l, h) => (portraitOf(l, h)?.roles ?? []).join(", ")]] : [];
  const columns = [...roles, ...labels, ...scores, ...metrics];
  const lines = rows.filter((row) => row.shown).map(({ l, h, layer }) => [layer, h, ...columns.map(([, of]) => of(l, h))]);
  return [["layer", "head", ...columns.map(([name]) => name)], ...lines];
}
function startHeads() {
  by("table-of-heads").addEventListener("scroll", layOutMore);
  addEventListener("beforeprint", () => layOut(0, rows.length));
  by("download-heads").addEventListener("click", () => save(`${fileName("heads")}.csv`, csv(numbersOfHeads())));
  by("keys").addEventListener("change", (event) => {
    chosen.keys = event.target.value;
    chosen.labels = new Set([...chosen.labels].filter((name) => knownRoles().includes(name)));
    write();
    redrawAll();
    saveView();
  });
  by("search").addEventListener("input", (event) => {
    chosen.search = event.target.value;
    filterHeads();
    redrawMapSoon();
  });
  // The only match, or the first in the order of the table.
  by("search").addEventListener("keydown", (event) => {
    const first = rows.find((row) => row.shown);
    if (event.key === "Enter" && first) openHead(first.l, first.h, event);
  });
}
