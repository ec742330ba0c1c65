// Measurements without their own section: a table each, and their figure.
function writeOthers() {
  by("others").hidden = !data.others.length;
  by("others-list").replaceChildren();
  for (const id of [...charts.keys()].filter((name) => name.startsWith("other-"))) charts.delete(id);
  data.others.forEach((other, i) => {
    const place = make(by("others-list"), "div");
    make(place, "h3", other.name);
    make(place, "p", other.summary);
    const beside = [...new Set(other.rows.flatMap((row) => Object.keys(row.controls)))];
    const shown = (value) => (value ? `${fixed(value.mean)}${interval(value)}` : "");
    table(make(place, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": `${other.name} as a table` }),
      ["metric", "value", ...beside.map((weights) => `${weights} control`), "control", "how to read it"],
      other.rows.map((row) => [
        row.unit ? `${row.title} (${row.unit})` : row.title,
        shown(row.value),
        ...beside.map((weights) => shown(row.controls[weights])),
        row.control === null ? "" : `${fixed(row.control)} ${row.control_title}`,
        row.reading,
      ]));
    if (!other.figure) return;
    make(place, "div", null, { id: `other-${i}`, class: "chart tall", role: "img", "aria-label": `Figure of ${other.name}` });
    const { template, title, ...layout } = other.figure.layout;
    chart(`other-${i}`, () => draw(`other-${i}`, other.figure.data, layout));
  });
}
