// Names of models, runs and metrics are inserted with textContent and plain(), never as HTML.
const data = JSON.parse(by("data").textContent);
const short = (value) => (value === null ? "–" : typeof value === "number" ? String(Number(value.toPrecision(4))) : value);

function rowsAsTable(parent, title, columns, rows) {
  const place = make(parent, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  table(place, columns, rows.map((row) => columns.map((name) => short(row[name]))));
}

// Lines over steps or sizes if runs are grouped by them, else one mark for each group.
function drawSection(section, i) {
  const along = data.along;
  const others = data.by.filter((name) => name !== along);
  const lines = new Map();
  for (const row of section.groups) {
    if (along && row[along] === null) continue;
    const name = plain(others.map((key) => short(row[key])).join(", ") || section.metric);
    if (!lines.has(name)) lines.set(name, []);
    lines.get(name).push(row);
  }
  const traces = [...lines].map(([name, rows]) => ({
    name, type: "scatter", mode: along ? "lines+markers" : "markers",
    x: rows.map((row) => (along ? Math.max(1, row[along]) : name)),
    y: rows.map((row) => row.mean),
    error_y: {
      type: "data", visible: true, thickness: 1, width: 2,
      symmetric: false,
      array: rows.map((row) => (row.high === null ? 0 : row.high - row.mean)),
      arrayminus: rows.map((row) => (row.low === null ? 0 : row.mean - row.low)),
    },
    hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
  }));
  draw(`plot-${i}`, traces, {
    showlegend: Boolean(along), legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: along ? { type: "log", title: { text: plain(along) } } : { type: "category", automargin: "height" },
    yaxis: { title: { text: plain(section.title) } },
  });
}
const drawAll = () => data.sections.forEach(drawSection);

setDark(matchMedia("(prefers-color-scheme: dark)").matches);
by("about").textContent = data.about;
data.sections.forEach((section, i) => {
  const parent = make(by("sections"), "section", null, { "aria-labelledby": `h-${i}` });
  make(parent, "h2", `${section.measurement}: ${section.title}`, { id: `h-${i}` });
  if (section.reading) make(parent, "p", section.reading);
  make(parent, "div", null, { id: `plot-${i}`, class: "chart", role: "img", "aria-label": `${section.title} by group; numbers in the table below` });
  if (section.trends.length) {
    const words = `Increase per factor of ten of ${data.along}, 95 % interval`;
    make(parent, "p", `${words}:`);
    rowsAsTable(parent, words, data.trend_columns, section.trends);
  }
  rowsAsTable(parent, `${section.title} as a table`, data.columns, section.groups);
});
startTheme(drawAll);
drawAll();
document.documentElement.dataset.ready = "true";
