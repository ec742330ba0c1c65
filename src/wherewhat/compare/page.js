"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function put(parent, kind, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  parent.append(made);
  return made;
}

const short = (value) => value === null ? "–" : typeof value === "number" ? String(Number(value.toPrecision(4))) : value;

function table(parent, columns, rows) {
  const made = put(put(parent, "div", undefined, "scroll"), "table");
  const head = put(put(made, "thead"), "tr");
  for (const name of columns) put(head, "th", name);
  const body = put(made, "tbody");
  for (const row of rows) {
    const line = put(body, "tr");
    for (const name of columns) put(line, "td", short(row[name]));
  }
}

/* Lines over steps or sizes where they are grouped by, else one mark for each group. */
function plot(parent, section) {
  const along = data.along;
  const others = data.by.filter((name) => name !== along);
  const lines = new Map();
  for (const row of section.groups) {
    if (along && row[along] === null) continue;
    const name = others.map((key) => short(row[key])).join(", ") || section.metric;
    if (!lines.has(name)) lines.set(name, []);
    lines.get(name).push(row);
  }
  const traces = [...lines].map(([name, rows]) => ({
    name, type: "scatter", mode: along ? "lines+markers" : "markers",
    x: rows.map((row) => along ? Math.max(1, row[along]) : name),
    y: rows.map((row) => row.mean),
    error_y: {
      type: "data", visible: true, thickness: 1, width: 2,
      array: rows.map((row) => row.high === null ? 0 : row.high - row.mean),
    },
    hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
  }));
  const layout = {
    margin: { t: 10, r: 10 }, showlegend: Boolean(along), paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", font: { color: getComputedStyle(document.body).color },
    xaxis: along ? { type: "log", title: { text: along } } : { type: "category", automargin: true },
    yaxis: { title: { text: section.title } },
  };
  Plotly.newPlot(put(parent, "div", undefined, "plot"), traces, layout, { responsive: true, displaylogo: false });
}

document.getElementById("about").textContent = data.about;
for (const section of data.sections) {
  const parent = put(document.getElementById("sections"), "section");
  put(parent, "h2", `${section.measurement}: ${section.title}`);
  if (section.reading) put(parent, "p", section.reading);
  plot(parent, section);
  if (section.trends.length) {
    put(parent, "p", `Rise with each tenfold of ${data.along}, 95 % interval:`);
    table(parent, data.trend_columns, section.trends);
  }
  table(parent, data.columns, section.groups);
}
