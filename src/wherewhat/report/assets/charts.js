// Charts are drawn when they come near the window, and again when their data change.
const charts = new Map();
const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const chart = charts.get(entry.target.id);
      chart.near = entry.isIntersecting;
      if (chart.near) bring(chart);
    }
  },
  { rootMargin: "400px 0px" },
);
function bring(chart) {
  if (!chart.stale) return;
  chart.stale = false;
  chart.paint();
}
// A chart for the element with that id; paint() draws it. For download it may have its own numbers() and picture(), or
// there are no downloads.
function chart(id, paint, { downloads = true, ...own } = {}) {
  charts.set(id, { paint, ...own, stale: true, near: false });
  if (downloads) offerDownloads(id);
  near.observe(by(id));
}
function redraw(...ids) {
  for (const id of ids) {
    const chart = charts.get(id);
    chart.stale = true;
    if (chart.near) bring(chart);
  }
}
const redrawAll = () => redraw(...charts.keys());
const drawAll = () => {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
  charts.forEach(bring);
};
addEventListener("beforeprint", drawAll);
