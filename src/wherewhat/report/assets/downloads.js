// Every chart can be downloaded: its numbers as CSV, its picture as SVG and PNG.
const unplain = (text) => String(text).replace(/<br>/g, ", ").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
// Text that a spreadsheet would read as a formula is written as a JSON string, whose first character is a quote; tokens
// always are, so that JSON.parse gives back every one of them as it is.
function csvCell(value) {
  if (value === null || value === undefined || value === "") return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = /^\s*[=+\-@]|^[\t\r\n]/.test(value) ? JSON.stringify(value) : String(value);
  return `"${text.replace(/"/g, '""')}"`;
}
const csv = (lines) => lines.map((line) => `${line.map(csvCell).join(",")}\r\n`).join("");
// Model and chart, and the head for charts of one; the end is kept where the name is too long.
const chartName = (id) => (by(id)?.closest("#panel") ? `${id}-${headName(chosen.layer, chosen.head)}` : id);
const fileName = (id) => `${data.model.name ?? all.title}-${chartName(id)}`.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+/, "").slice(-120);
function save(name, content, type = "text/csv") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
// A picture as PNG with two pixels for each of the page's.
async function savePicture(url, width, height, name) {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  canvas.toBlob((content) => save(name, content, "image/png"));
}
// The numbers of a chart as rows below a header: cells of a map, or points of its lines, marks and bars.
function numbersOf(place) {
  const title = (name) => unplain(place._fullLayout[name]?.title?.text || name[0]);
  const traces = place._fullData.filter((trace) => trace.line?.width !== 0 && trace.showscale !== false);
  if (traces[0]?.type === "heatmap") {
    const at = (values, i) => (values ? values[i] : i);
    return [[title("yaxis"), title("xaxis"), "value"], ...traces.flatMap((trace) => Array.from(trace.z).flatMap((row, i) => Array.from(row).map((z, j) => [at(trace.y, i), at(trace.x, j), z])))];
  }
  const lines = traces.flatMap((trace) => Array.from(trace.y ?? []).map((y, i) => {
    const bars = trace.error_y?.visible ? trace.error_y : null;
    const [low, high] = trace.meta?.low ? [trace.meta.low[i], trace.meta.high[i]] : bars?.array && y !== null ? [y - (bars.arrayminus ?? bars.array)[i], y + bars.array[i]] : [];
    const note = Array.isArray(trace.text) ? unplain(trace.text[i]) : "";
    return [unplain(place.data[trace.index].name ?? ""), trace.x ? trace.x[i] : i, y, low, high, note];
  }));
  return [["series", title("xaxis"), title("yaxis"), "low", "high", "note"], ...lines];
}
// Buttons below the chart with that id, in a frame around all.
function offerDownloads(id) {
  const place = by(id);
  if (place.parentNode.classList.contains("charted")) return;
  const frame = document.createElement("div");
  frame.className = "charted";
  place.replaceWith(frame);
  frame.append(place);
  const buttons = make(frame, "div", null, { class: "downloads" });
  const offer = (text, action) => make(buttons, "button", text, { type: "button", "aria-label": `${text} of: ${place.getAttribute("aria-label")}` }).addEventListener("click", () => {
    const { numbers, picture } = charts.get(id);
    bring(charts.get(id));
    if (numbers || place._fullData) action(numbers ?? (() => numbersOf(place)), picture ?? (() => place));
  });
  offer("CSV", (numbers) => save(`${fileName(id)}.csv`, csv(numbers())));
  if (typeof Plotly === "undefined") return;
  const drawn = (picture) => {
    const { data: traces, layout } = picture();
    return { data: traces, layout: { ...layout, paper_bgcolor: isDark() ? "#15161a" : "#ffffff" } };
  };
  const size = () => ({ format: "svg", width: place.clientWidth, height: place.clientHeight });
  offer("SVG", (_, picture) => Plotly.downloadImage(drawn(picture), { ...size(), filename: fileName(id) }));
  offer("PNG", (_, picture) => {
    const [{ width, height }, name] = [size(), `${fileName(id)}.png`];
    Plotly.toImage(drawn(picture), size()).then((url) => savePicture(url, width, height, name));
  });
}
