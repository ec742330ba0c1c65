"use strict";
// Text from models and documents reaches the page through textContent and through plain(), never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const { layers, heads } = data.model;
  const chosen = { layer: 0, head: 0, metric: 0, weights: "trained" };

  function make(parent, tag, text, attributes = {}) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.append(node);
    return node;
  }
  // Plotly reads a few tags and entities in its texts.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const show = (x) => (x === null || x === undefined ? "undefined" : Math.abs(x) >= 1000 ? x.toFixed(0) : String(x));

  const fixed = (x) => (x === null ? "undefined" : x.toFixed(3));
  const interval = (value) => (value.low === null ? "" : ` (${fixed(value.low)} to ${fixed(value.high)})`);

  // ---- packed numbers: lo + (hi - lo) q / (2^bits - 2), the greatest integer for nothing
  function unpack(packed) {
    const raw = atob(packed.data);
    const wide = packed.bits === 16;
    const top = wide ? 65534 : 254;
    const out = new Array(wide ? raw.length / 2 : raw.length);
    for (let i = 0; i < out.length; i++) {
      const code = wide ? raw.charCodeAt(2 * i) + 256 * raw.charCodeAt(2 * i + 1) : raw.charCodeAt(i);
      out[i] = code > top ? null : packed.lo + ((packed.hi - packed.lo) * code) / top;
    }
    return out;
  }

  // ---- charts
  const isDark = () => document.documentElement.classList.contains("dark");
  function draw(id, traces, layout) {
    const ink = isDark() ? "#ececf1" : "#1b1b1f";
    const line = isDark() ? "#3a3b44" : "#d5d5dc";
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    const full = {
      margin: { l: 48, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 12 },
      hoverlabel: { align: "left" },
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
    if (layout.polar) {
      full.polar = { bgcolor: "rgba(0,0,0,0)", ...layout.polar };
      for (const name of ["radialaxis", "angularaxis"]) full.polar[name] = { ...axis, ...layout.polar[name] };
      delete full.xaxis;
      delete full.yaxis;
    }
    return Plotly.react(by(id), traces, full, { responsive: true, displaylogo: false, displayModeBar: false });
  }
  const axisTitle = (text) => ({ title: { text } });

  // ---- 1. model and numbers
  function drawModel() {
    const m = data.model;
    by("name").textContent = m.name;
    document.title = `${m.name}: where and what`;
    const most = Math.max(...heads);
    const size = m.parameters >= 1e9 ? `${(m.parameters / 1e9).toFixed(1)} billion` : m.parameters >= 1e6 ? `${(m.parameters / 1e6).toFixed(0)} million` : String(m.parameters);
    by("about").textContent =
      `${m.name} is a ${m.type} model with ${size} parameters: ${layers.length} layers of ${most} attention heads ` +
      `(${m.kv_heads.join(" or ")} key heads)${m.positions ? `, made for ${m.positions} positions` : ""}. ` +
      `It was measured in ${m.dtype} on ${m.documents} document${m.documents > 1 ? "s" : ""} of ${m.tokens} tokens ` +
      `of ${m.embedded ? "the embedded English prose" : "the given text"}. Twins of it are the controls: one freshly ` +
      `initialised (random), one with the entries of its query and key weights permuted (shuffled). ` +
      `Intervals are 95 % over documents.`;
    for (const number of data.numbers) {
      const card = make(by("numbers"), "li");
      make(card, "h3", number.title);
      for (const value of number.values) {
        const line = make(card, "div");
        make(line, "span", fixed(value.mean), { class: "big" });
        make(line, "span", ` ${value.name}${interval(value)}`);
      }
      const list = make(card, "ul", null, { class: "controls-list", "aria-label": "to compare with" });
      for (const value of number.controls) make(list, "li", `${value.name}: ${fixed(value.mean)}${interval(value)}`);
      make(card, "div", number.reading, { class: "note" });
    }
  }

  // ---- 2. map of heads
  function valuesOf(metric, weights) {
    return metric.values[weights] || metric.values.trained;
  }
  function span(metric) {
    const all = Object.values(metric.values).flat(2).filter((x) => x !== null).sort((x, y) => x - y);
    if (!all.length) return [0, 1];
    const at = (q) => all[Math.min(all.length - 1, Math.round(q * (all.length - 1)))];
    const [low, high] = [at(0.01), at(0.99)];
    return high > low ? [low, high] : [low - 0.5, low + 0.5];
  }
  function drawMap() {
    const metric = data.metrics[chosen.metric];
    const most = Math.max(...heads);
    const found = valuesOf(metric, chosen.weights);
    const z = layers.map((_, l) => Array.from({ length: most }, (_, h) => (found[l] ? found[l][h] ?? null : null)));
    const hover = z.map((row, l) => row.map((x, h) => `layer ${layers[l]}, head ${h}<br>${plain(metric.title)}: ${show(x)} ${plain(metric.unit)}`));
    const [zmin, zmax] = span(metric);
    const control = metric.control === null ? "" : ` Control (${metric.control_title}): ${show(metric.control)}.`;
    by("reading").textContent = `${metric.reading}${control}`;
    const trace = {
      type: "heatmap", z, x: [...Array(most).keys()], y: layers, zmin, zmax, colorscale: "Viridis", text: hover,
      hoverinfo: "text", xgap: 1, ygap: 1, colorbar: { thickness: 12, len: 1 },
    };
    const l = chosen.layer;
    const box = { type: "rect", x0: chosen.head - 0.5, x1: chosen.head + 0.5, y0: layers[l] - 0.5, y1: layers[l] + 0.5, line: { color: "#ff4d9d", width: 3 } };
    return draw("map", [trace], { xaxis: { ...axisTitle("head"), dtick: most > 12 ? 4 : 1, showgrid: false }, yaxis: { ...axisTitle("layer"), dtick: layers.length > 12 ? 5 : 1, showgrid: false }, shapes: [box] });
  }

  // ---- the panel of one head
  function square(values, rows) {
    const z = Array.from({ length: rows }, () => new Array(rows).fill(null));
    let at = 0;
    for (let i = 0; i < rows; i++) for (let j = 0; j <= i; j++) z[i][j] = values[at++];
    return z;
  }
  function drawLogits(record) {
    const truth = unpack(record.map);
    const rows = Math.floor(Math.sqrt(2 * truth.length));
    const real = square(truth, rows);
    const pieces = data.text.tokens.slice(0, rows);
    const extremes = [record.map.lo, record.map.hi];
    const reach = (extremes[1] - extremes[0]) / 2 || 1;
    const tell = (z) => z.map((row, i) => row.map((x, j) => (x === null ? "" : `${plain(JSON.stringify(pieces[i]))} → ${plain(JSON.stringify(pieces[j]))}<br>distance ${i - j}: ${x.toFixed(2)}`)));
    const picture = (id, z, extra) =>
      draw(id, [{ type: "heatmap", z, text: tell(z), hoverinfo: "text", colorbar: { thickness: 8 }, ...extra }], {
        yaxis: { autorange: "reversed", showgrid: false }, xaxis: { showgrid: false }, margin: { l: 30, r: 8, t: 8, b: 28 },
      });
    picture("true", real, { zmin: extremes[0], zmax: extremes[1], colorscale: "Viridis" });
    if (!record.a) return;
    const [a, b, c] = [unpack(record.a), unpack(record.b), unpack(record.c)];
    const fit = real.map((row, i) => row.map((x, j) => (x === null || i - j >= a.length ? null : a[i - j] + b[i] + c[j])));
    const rest = real.map((row, i) => row.map((x, j) => (fit[i][j] === null ? null : x - fit[i][j])));
    picture("fitted", fit, { zmin: extremes[0], zmax: extremes[1], colorscale: "Viridis" });
    picture("residual", rest, { zmin: -reach, zmax: reach, colorscale: [[0, "#b35806"], [0.5, "#f7f7f7"], [1, "#2166ac"]] });
    draw("curve", [{ type: "scatter", mode: "lines", x: a.map((_, d) => d), y: a, line: { color: "#1f77b4" }, hovertemplate: "distance %{x}: %{y:.3f}<extra></extra>" }], {
      xaxis: axisTitle("distance (tokens)"), yaxis: axisTitle("a"),
    });
    drawText(c.map((x) => x ?? 0));
  }
  function drawText(c) {
    const most = Math.max(...c.map(Math.abs)) || 1;
    const place = document.createDocumentFragment();
    data.text.tokens.forEach((piece, j) => {
      if (j >= c.length) return;
      const share = Math.min(1, Math.abs(c[j]) / most);
      const token = make(place, "span", piece, { title: `c = ${c[j].toFixed(3)}` });
      token.style.backgroundColor = c[j] > 0 ? `rgba(86, 160, 233, ${share})` : `rgba(230, 159, 0, ${share})`;
    });
    by("text").replaceChildren(place);
  }
  function drawPlanes(record) {
    if (!record.use) return void Plotly.purge(by("planes"));
    const turns = data.turns[chosen.layer];
    const names = record.use.map((_, p) => String(p + 1));
    const hover = record.use.map((x, p) => `plane ${p + 1}: ${show(x)}` +
      (turns && turns[p] ? `<br>one turn in ${(1 / turns[p]).toPrecision(3)} tokens` : "") +
      (record.share ? `<br>share of variance ${show(record.share[p])}` : ""));
    draw("planes", [{ type: "barpolar", r: record.use, theta: names, text: hover, hoverinfo: "text", marker: { color: record.use.map((_, p) => p), colorscale: "Cividis" } }], {
      margin: { l: 30, r: 30, t: 24, b: 24 },
      polar: { angularaxis: { type: "category", direction: "clockwise", nticks: 8 }, radialaxis: { angle: 90, tickangle: 90, nticks: 3 } },
    });
  }
  function swapTrace(colour, colorscale, extra) {
    const s = data.swaps;
    const points = { x: [], y: [], text: [], colour: [], at: [] };
    layers.forEach((layer, l) => (s.s_pos[l] || []).forEach((pos, h) => {
      if (pos === null) return;
      points.x.push(pos);
      points.y.push(s.s_sym[l][h]);
      points.colour.push(colour(l, h));
      points.at.push([l, h]);
      points.text.push(`layer ${layer}, head ${h}<br>positional ${show(pos)}, symbolic ${show(s.s_sym[l][h])}`);
    }));
    return { type: "scatter", mode: "markers", x: points.x, y: points.y, text: points.text, customdata: points.at, hoverinfo: "text", marker: { size: 8, color: points.colour, colorscale, line: { width: 0.5, color: "#888" }, ...extra } };
  }
  const unit = { range: [-0.03, 1.03] };
  function drawPlace() {
    const s = data.swaps;
    const scores = s && s.s_pos[chosen.layer];
    if (!scores || scores[chosen.head] === null) {
      by("label").textContent = "Its positional and symbolic scores were not measured.";
      return;
    }
    const at = (name) => s[name][chosen.layer][chosen.head];
    const [name, low, high] = [s.labels[at("label")] || "undefined", s.gamma, +(1 - s.gamma).toFixed(4)];
    const why = {
      positional: `its positional score is at least ${high} and its symbolic score at most ${low}`,
      symbolic: `its symbolic score is at least ${high} and its positional score at most ${low}`,
      uniform: `both scores are at least ${high}: its attention is even`,
      mixed: `neither score is at least ${high} with the other at most ${low}`,
    }[name];
    const score = (which) => `${show(at(which))} (${show(at(`${which}_low`))} to ${show(at(`${which}_high`))})`;
    by("label").textContent = `Label: ${name}${why ? `, because ${why}` : ""}. Positional ${score("s_pos")}, symbolic ${score("s_sym")}.`;
    const others = swapTrace(() => "#999999", undefined, { size: 5, opacity: 0.5 });
    const own = {
      type: "scatter", mode: "markers", x: [at("s_pos")], y: [at("s_sym")], marker: { size: 14, color: "#d6277b", symbol: "diamond" }, hoverinfo: "skip",
      error_x: { type: "data", symmetric: false, array: [at("s_pos_high") - at("s_pos")], arrayminus: [at("s_pos") - at("s_pos_low")], color: "#d6277b" },
      error_y: { type: "data", symmetric: false, array: [at("s_sym_high") - at("s_sym")], arrayminus: [at("s_sym") - at("s_sym_low")], color: "#d6277b" },
    };
    draw("place", [others, own], { showlegend: false, xaxis: { ...axisTitle("positional"), ...unit }, yaxis: { ...axisTitle("symbolic"), ...unit } });
  }
  function drawPanel() {
    const record = data.records[chosen.layer][chosen.head];
    by("h-panel").textContent = `Layer ${layers[chosen.layer]}, head ${chosen.head}`;
    by("layer").value = chosen.layer;
    by("head").value = chosen.head;
    drawLogits(record);
    drawPlanes(record);
    drawPlace();
    const rows = document.createDocumentFragment();
    for (const metric of data.metrics) {
      const row = make(rows, "tr");
      make(row, "th", metric.title, { scope: "row", title: metric.reading });
      for (const [weights, values] of Object.entries(metric.values)) {
        make(row, "td", `${weights} ${show(values[chosen.layer] ? values[chosen.layer][chosen.head] : null)}`);
      }
    }
    by("numbers-of-head").replaceChildren(rows);
  }
  function choose(layer, head) {
    const fewer = heads[layer] !== by("head").options.length;
    chosen.layer = layer;
    chosen.head = Math.min(head, heads[layer] - 1);
    if (fewer) fill(by("head"), Array.from({ length: heads[layer] }, (_, h) => [h, h]));
    drawPanel();
    Plotly.relayout(by("map"), { "shapes[0].x0": chosen.head - 0.5, "shapes[0].x1": chosen.head + 0.5, "shapes[0].y0": layers[layer] - 0.5, "shapes[0].y1": layers[layer] + 0.5 });
  }

  // ---- 3. all heads in the plane
  function drawScatter() {
    if (!data.swaps) return void (by("plane-note").textContent = "Not measured for this model.");
    const r = data.metrics.find((metric) => metric.id === "r");
    const byR = by("colour").value === "r" && r;
    const colour = byR ? (l, h) => (r.values.trained[l] || [])[h] : (l) => layers[l];
    const trace = swapTrace(colour, byR ? "Cividis" : "Viridis", { colorbar: { thickness: 12, title: { text: byR ? "r" : "layer" } } });
    by("plane-note").textContent = "Right below: pure positional. Left above: pure symbolic. Right above: even attention. Click a head to see it.";
    draw("scatter", [trace], { xaxis: { ...axisTitle("positional score"), ...unit }, yaxis: { ...axisTitle("symbolic score"), ...unit } });
  }

  // ---- 4. controlled distance
  function drawDistance() {
    if (!data.distance) {
      by("distance-note").textContent = "Not measured for this model.";
      by("distance").hidden = by("drift").hidden = true;
      return;
    }
    const x = data.distance.distances.map((d) => (d === 0 ? "0" : String(d)));
    const colours = ["#0072b2", "#d55e00"];
    const fills = ["rgba(0,114,178,0.2)", "rgba(213,94,0,0.2)"];
    const picture = (id, names, title) => {
      const traces = names.filter((name) => data.distance.curves[name]).flatMap((name, i) => {
        const curve = data.distance.curves[name];
        const edge = { type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip", x };
        return [
          { ...edge, y: curve.low },
          { ...edge, y: curve.high, fill: "tonexty", fillcolor: fills[i] },
          { type: "scatter", mode: "lines+markers", x, y: curve.mid, name: curve.title, line: { color: colours[i], dash: i ? "dash" : "solid" } },
        ];
      });
      draw(id, traces, { xaxis: { ...axisTitle("dummy distance (tokens)"), type: "category" }, yaxis: axisTitle(title), legend: { orientation: "h", y: 1.12, traceorder: "normal" } });
    };
    picture("distance", ["rank_correlation", "rank_correlation_scrambled"], "rank correlation");
    picture("drift", ["drift", "drift_scrambled"], "drift");
  }

  // ---- 5. method and provenance
  function drawMethod() {
    for (const item of data.method) {
      make(by("method"), "dt", item.name);
      make(by("method"), "dd", `${item.summary} ${item.limits}`);
    }
    by("left-out").textContent = data.left_out.length ? `Left out: ${data.left_out.join("; ")}` : "";
    by("command").textContent = data.command;
    for (const run of data.runs) {
      const details = make(by("runs"), "details");
      make(details, "summary", run.name);
      make(details, "pre", JSON.stringify({ config: run.config, provenance: run.provenance }, null, 1), { tabindex: "0" });
    }
  }

  // ---- what the reader chooses
  function fill(select, pairs) {
    select.replaceChildren();
    for (const [value, text] of pairs) make(select, "option", text, { value });
  }
  function fillWeights() {
    const names = Object.keys(data.metrics[chosen.metric].values);
    if (!names.includes(chosen.weights)) chosen.weights = "trained";
    fill(by("weights"), ["trained", ...names.filter((name) => name !== "trained")].map((name) => [name, name]));
    by("weights").value = chosen.weights;
  }
  function setDark(dark) {
    document.documentElement.classList.toggle("dark", dark);
    by("theme").setAttribute("aria-pressed", String(dark));
  }
  function drawBelow() {
    drawScatter();
    drawDistance();
  }

  fill(by("metric"), data.metrics.map((metric, i) => [i, `${metric.title} (${metric.measurement})`]));
  fill(by("layer"), layers.map((layer, l) => [l, layer]));
  fill(by("head"), Array.from({ length: heads[0] }, (_, h) => [h, h]));
  fillWeights();
  setDark(matchMedia("(prefers-color-scheme: dark)").matches);
  drawModel();
  drawMethod();
  drawMap();
  drawPanel();
  by("metric").addEventListener("change", (event) => {
    chosen.metric = +event.target.value;
    fillWeights();
    drawMap();
  });
  by("weights").addEventListener("change", (event) => {
    chosen.weights = event.target.value;
    drawMap();
  });
  by("layer").addEventListener("change", (event) => choose(+event.target.value, chosen.head));
  by("head").addEventListener("change", (event) => choose(chosen.layer, +event.target.value));
  by("colour").addEventListener("change", drawScatter);
  by("theme").addEventListener("click", () => {
    setDark(!isDark());
    drawMap();
    drawPanel();
    drawBelow();
  });
  by("map").on("plotly_click", (event) => {
    const l = layers.indexOf(event.points[0].y);
    if (event.points[0].x < heads[l]) choose(l, event.points[0].x);
  });
  // What is further down is drawn when the reader already sees the beginning.
  setTimeout(() => {
    drawBelow();
    if (data.swaps) {
      by("scatter").on("plotly_click", (event) => {
        choose(...event.points[0].customdata);
        by("panel").scrollIntoView();
      });
    }
    document.documentElement.dataset.ready = "true";
  }, 0);
})();
