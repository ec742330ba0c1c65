// Shared by all pages: elements, whose text is never parsed as HTML, and charts in the colours of the page.
const by = (id) => document.getElementById(id);
const isDark = () => document.documentElement.classList.contains("dark");
function setDark(dark) {
  document.documentElement.classList.toggle("dark", dark);
  by("theme").setAttribute("aria-pressed", String(dark));
}

function make(parent, tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}
// A table with a header row; the first cell of each row names it. Cells are text or elements.
function table(place, header, rows) {
  const element = document.createElement("table");
  const top = make(make(element, "thead"), "tr");
  for (const name of header) make(top, "th", name, { scope: "col" });
  const body = make(element, "tbody");
  for (const row of rows) {
    const line = make(body, "tr");
    row.forEach((cell, i) => {
      const isNode = cell instanceof Node;
      const node = make(line, i ? "td" : "th", isNode ? null : cell, i ? {} : { scope: "row" });
      if (isNode) node.append(cell);
    });
  }
  place.replaceChildren(element);
}

// plotly.js is stored compressed, and runs as a script of its own, which defines Plotly.
async function startPlotly() {
  const bytes = Uint8Array.from(atob(by("plotly").textContent), (character) => character.charCodeAt(0));
  const code = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  make(document.body, "script", await new Response(code).text()).remove();
}
if (by("plotly").textContent) await startPlotly();

// Plotly interprets some tags and entities in its texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Charts as Python defines them; an array that the data hold is a path there.
const stored = JSON.parse(by("data").textContent);
const mapped = (part, change) => (Array.isArray(part) ? part.map(change) : Object.fromEntries(Object.entries(part).map(([key, value]) => [key, change(value, key)])));
const isPart = (part) => part !== null && typeof part === "object";
const resolved = (part) => (!isPart(part) ? part : part.$ ? part.$.reduce((at, key) => at[key], stored) : mapped(part, resolved));
const { dark: DARK, charts: CHARTS } = resolved(JSON.parse(by("figures").textContent));
// A part of a chart in the colours of the page.
const coloured = (part, key) => (isDark() && typeof part === "string" && /color$/.test(key) ? DARK[part] ?? part : isPart(part) && !(Array.isArray(part) && !isPart(part[0])) ? mapped(part, coloured) : part);
function themed(layout) {
  const ink = isDark() ? "#ececf1" : "#1b1b1f";
  const line = isDark() ? "#3a3b44" : "#d5d5dc";
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
  const full = {
    margin: { l: 52, r: 12, t: 12, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12 },
    hoverlabel: { align: "left" },
    ...layout,
  };
  const names = Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name));
  for (const name of new Set(["xaxis", "yaxis", ...names])) full[name] = { ...axis, ...layout[name] };
  return full;
}
function draw(id, chart) {
  const { data: traces, layout } = coloured(chart);
  return Plotly.react(by(id), traces, themed(layout), { responsive: true, displaylogo: false, displayModeBar: false });
}
// The button of the theme, which draws all charts again in its colours.
function startTheme(drawAll) {
  by("theme").addEventListener("click", () => {
    setDark(!isDark());
    drawAll();
  });
}
// Configuration and provenance of each run, folded.
function writeRuns(runs) {
  for (const run of runs) {
    const details = make(by("runs"), "details");
    make(details, "summary", run.name);
    make(details, "pre", JSON.stringify({ config: run.config, provenance: run.provenance }, null, 2), { tabindex: "0" });
  }
}
