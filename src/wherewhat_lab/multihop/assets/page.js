// Text from files is only ever set through textContent; plotly's texts are escaped where they are made.
const data = stored;
const charts = [];
const drawAll = () => charts.forEach(([id, chart]) => draw(id, { data: chart.traces, layout: chart.layout }));

by("about").textContent = data.about;
data.sections.forEach((section, i) => {
  const parent = make(by("sections"), "section", null, { "aria-labelledby": `h-${i}` });
  make(parent, "h2", `${i + 1}. ${section.title}`, { id: `h-${i}` });
  make(parent, "p", section.note, { class: "note" });
  const grid = make(parent, "div", null, { class: "charts" });
  section.charts.forEach((chart, j) => {
    const figure = make(grid, "figure");
    make(figure, "figcaption", chart.title);
    make(figure, "div", null, { id: `chart-${i}-${j}`, class: "chart", role: "img", "aria-label": `${section.title}: ${chart.title}` });
    charts.push([`chart-${i}-${j}`, chart]);
  });
  for (const { title, header, rows } of section.tables) {
    make(parent, "h3", title);
    const place = make(parent, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": `${section.title}: ${title}` });
    table(place, header, rows);
  }
});
writeRuns(data.runs);
startTheme(drawAll);
drawAll();
document.documentElement.dataset.ready = "true";
