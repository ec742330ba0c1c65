// Names of models, runs and metrics are inserted with textContent and plain(), never as HTML.
const data = stored;
const short = (value) => (value === null ? "–" : typeof value === "number" ? String(Number(value.toPrecision(4))) : value);

function rowsAsTable(parent, title, columns, rows) {
  const place = make(parent, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": title });
  table(place, columns, rows.map((row) => columns.map((name) => short(row[name]))));
}

const drawAll = () => CHARTS.forEach((chart, i) => draw(`plot-${i}`, chart));

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
