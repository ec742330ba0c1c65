// Cards of judged claims: of the page of claims, and of a report. All texts are inserted as text.
const OUTCOMES = { true: "yes", false: "no", null: "open" };

function shape(picture, tag, attributes) {
  const node = document.createElementNS(picture.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  picture.append(node);
}

// An interval against its threshold; the side that is needed is shaded.
function intervalPicture(parent, bound) {
  const words = `${bound.words}; needed: ${bound.needed}: ${OUTCOMES[bound.outcome]}`;
  const figure = make(parent, "figure", null, { class: "bound" });
  const picture = by("interval-picture").content.firstElementChild.cloneNode();
  picture.setAttribute("aria-label", words);
  picture.setAttribute("class", `outcome-${OUTCOMES[bound.outcome]}`);
  figure.append(picture);
  const percent = (value) => `${value}%`;
  if (bound.right !== null) {
    const from = bound.right ? bound.threshold : 0;
    shape(picture, "rect", { class: "needed", x: percent(from), width: percent(bound.right ? 100 - from : bound.threshold), y: 0, height: "100%" });
  }
  shape(picture, "line", { class: "axis", x1: 0, x2: "100%", y1: "50%", y2: "50%" });
  shape(picture, "line", { class: "interval", x1: percent(bound.low), x2: percent(bound.high), y1: "50%", y2: "50%" });
  shape(picture, "circle", { class: "mean", cx: percent(bound.mean), cy: "50%", r: 5 });
  shape(picture, "line", { class: "threshold", x1: percent(bound.threshold), x2: percent(bound.threshold), y1: 0, y2: "100%" });
  make(figure, "figcaption", words, { "aria-hidden": "true" });
}

function listOf(parent, items) {
  const list = make(parent, "ul");
  for (const item of items) make(list, "li", item);
}

// The verdict on one model with its numbers, parts, stability and runs.
function writeVerdict(parent, claim, heading) {
  const line = make(parent, "p");
  make(line, "strong", claim.words, { class: `verdict ${claim.verdict.replaceAll(" ", "-")}` });
  if (claim.verdict !== "not judged") make(parent, "p", `Stability: ${claim.stability}.`);
  for (const part of claim.parts) {
    const place = make(parent, "div", null, { class: "part" });
    make(place, "p", `${OUTCOMES[part.outcome]}: ${part.statement}`);
    for (const bound of part.bounds) intervalPicture(place, bound);
  }
  if (claim.numbers.length) {
    make(parent, heading, "Numbers and controls");
    listOf(parent, claim.numbers.map((number) => `${number.words} ${number.title}${number.control === null ? "" : `; ${number.control} ${number.control_title}`}`));
  }
  if (claim.notes.length) listOf(parent, claim.notes);
  if (claim.change) make(parent, "p", `What would change it: ${claim.change}.`);
  if (claim.runs.length) {
    const runs = make(parent, "p", "Runs: ", { class: "note" });
    claim.runs.forEach((run, i) => {
      if (i) runs.append(", ");
      if (run.address === null) runs.append(run.name);
      else make(runs, "a", run.name, { href: run.address });
    });
  }
}
