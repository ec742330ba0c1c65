// Live pictures of the lesson: plain SVG, drawn from the numbers of one model in the page. Nothing is loaded.
(() => {
  const source = document.getElementById("lesson-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const planes = data.theta.length;
  const distances = data.tokens;
  const state = { head: 0, plane: 4, distance: 6, query: 23, key: 15, added: planes };
  const drawings = [];

  // Elements

  const SVG = "http://www.w3.org/2000/svg";
  const svg = (name, attributes, ...children) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const html = (name, attributes, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const shown = (value) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(2);
  const word = (index) => `“${data.words[index].trim()}”`;

  // A slider or list that changes one value of the state, and draws everything again.
  function control(title, name, options) {
    const input = options.choices
      ? html("select", {}, ...options.choices.map((choice, index) => html("option", { value: index }, choice)))
      : html("input", { type: "range", min: options.min, max: options.max, step: 1 });
    input.addEventListener("input", () => {
      state[name] = Number(input.value);
      drawAll();
    });
    const value = options.say ? html("output", {}) : "";
    drawings.push(() => {
      if (options.most) input.max = options.most();
      input.value = state[name];
      if (options.say) value.textContent = options.say(state[name]);
    });
    return html("label", {}, html("span", {}, title), input, value);
  }

  const headControl = () =>
    control("Head", "head", { choices: data.heads.map((head) => `${head.name}: ${head.note}`) });

  // A picture: controls, drawing, and a sentence that says the same.
  function picture(name, controls, size, title, draw) {
    const place = document.querySelector(`.lesson[data-picture="${name}"]`);
    if (!place) return;
    const image = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img", "aria-label": title });
    const sentence = html("p", { "aria-live": "polite" });
    place.replaceChildren(html("div", { class: "lesson-controls" }, ...controls), image, sentence);
    drawings.push(() => {
      image.replaceChildren();
      sentence.textContent = draw(image, data.heads[state.head]);
    });
  }

  function drawAll() {
    state.key = Math.min(state.key, state.query);
    for (const draw of drawings) draw();
  }

  // Numbers

  // Contribution of a plane to the logit at a distance: Re(q · conj(k) · exp(iθd)).
  function contribution(q, k, plane, distance) {
    const [a, b] = q[plane];
    const [c, d] = k[plane];
    const angle = data.theta[plane] * distance;
    return (a * c + b * d) * Math.cos(angle) - (b * c - a * d) * Math.sin(angle);
  }
  function logit(q, k, distance) {
    let sum = 0;
    for (let plane = 0; plane < planes; plane += 1) sum += contribution(q, k, plane, distance);
    return sum;
  }
  const range = (count) => Array.from({ length: count }, (_, index) => index);
  const centred = (values) => {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return values.map((value) => value - mean);
  };
  function correlation(x, y) {
    const [u, v] = [centred(x), centred(y)];
    const product = (s, t) => s.reduce((sum, value, index) => sum + value * t[index], 0);
    return product(u, v) / Math.sqrt(product(u, u) * product(v, v));
  }

  // Axes of a curve: returns the functions from values to coordinates.
  function axes(image, box, values, labels) {
    const [left, top, width, height] = box;
    const low = Math.min(0, ...values);
    const high = Math.max(0, ...values);
    const span = high - low || 1;
    const x = (distance) => left + (width * distance) / (distances - 1);
    const y = (value) => top + height - (height * (value - low)) / span;
    image.append(
      svg("line", { class: "lesson-axis", x1: left, x2: left + width, y1: y(0), y2: y(0) }),
      svg("line", { class: "lesson-axis", x1: left, x2: left, y1: top, y2: top + height }),
      svg("text", { x: left + width, y: top + height + 16, "text-anchor": "end" }, labels[0]),
      svg("text", { x: left, y: top - 6 }, labels[1]),
      svg("text", { x: left - 4, y: y(high) + 4, "text-anchor": "end" }, shown(high)),
      svg("text", { x: left - 4, y: y(low) + 4, "text-anchor": "end" }, shown(low)),
    );
    return [x, y];
  }
  const line = (x, y, values, kind) =>
    svg("polyline", { class: `lesson-line ${kind}`, points: values.map((value, d) => `${x(d).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });

  // 1. One plane

  function arrow(image, [x, y], length, angle, kind, label) {
    const [tipX, tipY] = [x + length * Math.cos(angle), y - length * Math.sin(angle)];
    const barb = (turn) => `${tipX - 9 * Math.cos(angle + turn)},${tipY + 9 * Math.sin(angle + turn)}`;
    image.append(
      svg("line", { class: `lesson-arrow ${kind}`, x1: x, y1: y, x2: tipX, y2: tipY }),
      svg("polyline", { class: `lesson-arrow ${kind}`, points: `${barb(0.4)} ${tipX},${tipY} ${barb(-0.4)}` }),
      svg("text", { class: kind, x: tipX + 10 * Math.cos(angle), y: tipY - 10 * Math.sin(angle) + 4, "text-anchor": "middle" }, label),
    );
  }

  picture(
    "plane",
    [
      headControl(),
      control("Plane", "plane", { min: 0, max: planes - 1, say: (plane) => `${plane + 1} of ${planes}` }),
      control("Distance", "distance", { min: 0, max: distances - 1, say: (distance) => `${distance} tokens` }),
    ],
    [640, 260],
    "A query and a key in one RoPE plane, and their contribution to the logit by distance",
    (image, head) => {
      const { plane, distance } = state;
      const [q, k] = [head.q[state.query], head.k[state.key]];
      const norm = ([a, b]) => Math.hypot(a, b);
      const angleOf = ([a, b]) => Math.atan2(b, a);
      const centre = [130, 130];
      const unit = 100 / Math.max(norm(q[plane]), norm(k[plane]), 1e-9);
      const turn = data.theta[plane] * distance;
      image.append(svg("circle", { class: "lesson-axis", cx: centre[0], cy: centre[1], r: 100 }));
      arrow(image, centre, unit * norm(k[plane]), angleOf(k[plane]), "lesson-what", "key");
      arrow(image, centre, unit * norm(q[plane]), angleOf(q[plane]) + turn, "lesson-where", "query");
      const values = range(distances).map((d) => contribution(q, k, plane, d));
      const [x, y] = axes(image, [320, 30, 300, 200], values, ["distance", "contribution to the logit"]);
      image.append(line(x, y, values, "lesson-where"), svg("circle", { class: "lesson-dot", cx: x(distance), cy: y(values[distance]), r: 5 }));
      const period = (2 * Math.PI) / data.theta[plane];
      const degrees = ((turn * 180) / Math.PI) % 360;
      return `Plane ${plane + 1} turns once in ${period < 10 ? period.toFixed(1) : Math.round(period).toLocaleString("en")} tokens. At distance ${distance} the query ${word(state.query)} has turned by ${degrees.toFixed(degrees < 10 ? 1 : 0)}° past full turns, and this plane adds ${shown(values[distance])} to its logit for the key ${word(state.key)}.`;
    },
  );

  // 2. The sum of planes

  picture(
    "sum",
    [headControl(), control("Planes, fastest first", "added", { min: 1, max: planes, say: (added) => `${added} of ${planes}` })],
    [640, 300],
    "Contributions of planes by distance, their sum, and the fitted distance term",
    (image, head) => {
      const curves = range(planes).map((plane) => centred(range(distances).map((d) => contribution(head.mean_q, head.mean_k, plane, d))));
      const added = curves.slice(0, state.added);
      const sum = range(distances).map((d) => added.reduce((total, curve) => total + curve[d], 0));
      const fitted = centred(head.a);
      const [x, y] = axes(image, [60, 30, 560, 240], [...sum, ...fitted], ["distance", "logit, mean removed"]);
      for (const curve of added) image.append(line(x, y, curve, "lesson-thin"));
      image.append(line(x, y, fitted, "lesson-fit"), line(x, y, sum, "lesson-where"));
      return `${head.name}: mean query and mean key in the ${state.added === planes ? `${planes} planes` : `${state.added} fastest of ${planes} planes`} (thin) add up to the thick curve. Its correlation with the fitted distance term of the text (dashed) is ${shown(correlation(sum, fitted))}.`;
    },
  );

  // 3. Where + what = logit

  const size = data.words.length;
  const PARTS = [
    ["logit", "logit"],
    ["where", "where: a[distance]"],
    ["what", "what: b[query] + c[key]"],
    ["rest", "rest"],
  ];
  function parts(head, i, j) {
    const whole = logit(head.q[i], head.k[j], i - j);
    const [where, query, key] = [head.a[i - j], head.b[i], head.c[j]];
    return { logit: whole, where, query, key, what: query + key, rest: whole - where - query - key };
  }

  picture(
    "logit",
    [
      headControl(),
      control("Query", "query", { min: 0, max: size - 1, say: word }),
      control("Key", "key", { min: 0, max: size - 1, most: () => state.query, say: word }),
    ],
    [640, 330],
    "Logits of one head on a passage, and their parts: distance, content and rest",
    (image, head) => {
      const table = range(size).map((i) => range(i + 1).map((j) => parts(head, i, j)));
      // Softmax ignores a constant of each row: pictures show values around the mean of their row.
      const cell = 6;
      const largest = Math.max(...table.flatMap((row) => centred(row.map((cells) => cells.logit)).map(Math.abs)));
      PARTS.forEach(([name, title], place) => {
        const left = 8 + place * 160;
        image.append(svg("text", { x: left, y: 14 }, title));
        table.forEach((row, i) =>
          centred(row.map((cells) => cells[name])).forEach((value, j) => {
            const square = svg("rect", { class: value < 0 ? "lesson-less" : "lesson-more", x: left + j * cell, y: 22 + i * cell, width: cell, height: cell, "fill-opacity": Math.min(1, Math.abs(value) / largest).toFixed(2) });
            square.addEventListener("click", () => {
              Object.assign(state, { query: i, key: j });
              drawAll();
            });
            image.append(square);
          }),
        );
        image.append(svg("rect", { class: "lesson-chosen", x: left + state.key * cell, y: 22 + state.query * cell, width: cell, height: cell }));
      });
      const chosen = parts(head, state.query, state.key);
      const bars = [["where", chosen.where, "lesson-where"], ["query", chosen.query, "lesson-what"], ["key", chosen.key, "lesson-what"], ["rest", chosen.rest, "lesson-rest"], ["logit", chosen.logit, "lesson-sum"]];
      let [total, ends] = [0, [0]];
      for (const [, value] of bars.slice(0, 4)) ends.push((total += value));
      const [low, high] = [Math.min(...ends, 0), Math.max(...ends, 0)];
      const x = (value) => 90 + (440 * (value - low)) / (high - low || 1);
      image.append(svg("line", { class: "lesson-axis", x1: x(0), x2: x(0), y1: 178, y2: 312 }));
      bars.forEach(([name, value, kind], place) => {
        const [from, to] = name === "logit" ? [0, value] : [ends[place], ends[place + 1]];
        const y = 182 + place * 26;
        image.append(
          svg("text", { x: 8, y: y + 14 }, name),
          svg("rect", { class: kind, x: x(Math.min(from, to)), y, width: Math.max(1, Math.abs(x(to) - x(from))), height: 18 }),
          svg("text", { x: x(Math.max(from, to)) + 6, y: y + 14 }, shown(value)),
        );
      });
      return `${head.name}, query ${word(state.query)}, key ${word(state.key)}, ${state.query - state.key} tokens back: where ${shown(chosen.where)}, query ${shown(chosen.query)}, key ${shown(chosen.key)}, rest ${shown(chosen.rest)}; logit ${shown(chosen.logit)}. Over all ${data.tokens} tokens the sum without the rest has r = ${shown(head.r)} (noise: ${shown(head.noise)}).`;
    },
  );

  drawAll();
})();
