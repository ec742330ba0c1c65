// Measurements without their own section: what they were measured on, a table, their figure and their command.
const otherId = (other) => `measured-${other.name}`;
function writeOthers() {
  by("others").hidden = !data.others.length;
  by("others-list").replaceChildren();
  for (const id of [...charts.keys()].filter((name) => name.startsWith("other-"))) charts.delete(id);
  data.others.forEach((other, i) => {
    const place = make(by("others-list"), "div");
    make(place, "h3", other.name, { id: otherId(other) });
    make(place, "p", other.summary);
    const beside = [...new Set(other.rows.flatMap((row) => Object.keys(row.controls)))];
    const kinds = beside.includes("random") ? " The random control is one untrained model." : "";
    const more = other.more ? ` ${plural(other.more, "other finished run")} of this measurement in the same folder ${other.more === 1 ? "is" : "are"} not shown.` : "";
    make(place, "p", `${other.about}${kinds}${more}`, { class: "note" });
    const shown = (value) => (value ? withInterval(value) : "");
    table(make(place, "div", null, { class: "scroll", tabindex: "0", role: "region", "aria-label": `${other.name} as a table` }),
      ["metric", "value", ...beside.map((weights) => `one ${weights} control`), "control", "how to read it"],
      other.rows.map((row) => [
        row.unit ? `${row.title} (${row.unit})` : row.title,
        shown(row.value),
        ...beside.map((weights) => shown(row.controls[weights])),
        row.control === null ? "" : `${fixed(row.control)} ${row.control_title}`,
        row.reading,
      ]));
    if (other.figure) {
      make(place, "div", null, { id: `other-${i}`, class: "chart tall", role: "img", "aria-label": `Figure of ${other.name}` });
      const { template, title, font, ...layout } = other.figure.layout;
      if (title?.text) make(place, "p", unplain(title.text), { class: "note" });
      chart(`other-${i}`, () => draw(`other-${i}`, { data: other.figure.data, layout }));
    }
    if (other.command) make(place, "pre", other.command, { tabindex: "0" });
  });
}
// The measurements of this section, after its entry in the contents.
function listOthers(entry) {
  data.others.forEach((other, i) => {
    entry.append(i ? ", " : ": ");
    make(entry, "a", other.name, { href: `#${otherId(other)}` });
  });
}
