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
// A chart for the element with that id; paint() draws it. For download it may have its own numbers() and picture().
function chart(id, paint, own = {}) {
  charts.set(id, { paint, ...own, stale: true, near: false });
  offerDownloads(id);
  near.observe(by(id));
}
function redraw(...ids) {
  for (const id of ids) {
    const found = charts.get(id);
    found.stale = true;
    if (found.near) bring(found);
  }
}
const redrawAll = () => redraw(...charts.keys());
const drawAll = () => charts.forEach(bring);
addEventListener("beforeprint", drawAll);

// Wong's palette for colour-blind readers; lines differ in dashes and marks as well.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"];
const DARK_COLOURS = ["#56b4e9", "#ff8c42", "#2ec79b", "#e39ac4", "#f0c34e"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const MARKS = ["circle", "square", "diamond", "triangle-up", "x"];
const colour = (i) => (isDark() ? DARK_COLOURS : COLOURS)[i % COLOURS.length];
const faint = (i, share) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour(i).slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${share})`;
};
const axisTitle = (text) => ({ title: { text } });
const LEGEND = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" };

// A line through means with a band between its bounds; values are {mean, low, high}.
function lineWithBand(x, values, name, i, extra = {}) {
  const at = (which) => values.map((value) => (value ? value[which] : null));
  const edge = { type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip", x, legendgroup: name, ...extra };
  const hovered = values.map((value) => `${plain(name)}: ${withInterval(value)}`);
  const bounded = values.some((value) => value && value.low !== null);
  return [
    ...(bounded ? [{ ...edge, y: at("low") }, { ...edge, y: at("high"), fill: "tonexty", fillcolor: faint(i, 0.18) }] : []),
    {
      type: "scatter", mode: "lines+markers", x, y: at("mean"), name: plain(name), legendgroup: name, text: hovered,
      meta: { low: at("low"), high: at("high") },
      hovertemplate: "%{x}: %{text}<extra></extra>", line: { color: colour(i), dash: DASHES[i % DASHES.length] },
      marker: { symbol: MARKS[i % MARKS.length], size: 7 }, ...extra,
    },
  ];
}
