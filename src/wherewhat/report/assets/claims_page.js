// The page of judged claims.
const data = stored;
const several = data.models.length > 1;
const nameOf = (model) => (model.weights === "trained" ? model.name : `${model.name} (${model.weights})`);

setDark(matchMedia("(prefers-color-scheme: dark)").matches);
startTheme(() => {});
by("names").textContent = data.models.map(nameOf).join(", ");

function verdictCell(claim) {
  const place = document.createElement("div");
  if (!claim) return place;
  make(place, "span", claim.verdict === "holds if" ? "holds if …" : claim.verdict, { class: `verdict ${claim.verdict.replaceAll(" ", "-")}` });
  if (claim.changed !== null) make(place, "div", `another in ${claim.changed}`, { class: "note" });
  return place;
}
function claimLink(card) {
  const link = document.createElement("a");
  link.href = `#claim-${card.number}`;
  link.textContent = `${card.number}. ${card.title}`;
  return link;
}
table(by("verdicts"), ["claim", ...data.models.map(nameOf)], data.cards.map((card) => [claimLink(card), ...data.models.map((_, i) => verdictCell(card.models[i]))]));

for (const card of data.cards) {
  const place = make(by("cards"), "article", null, { class: "claim", id: `claim-${card.number}`, "aria-labelledby": `h-${card.number}` });
  make(place, "h3", `${card.number}. ${card.title}`, { id: `h-${card.number}` });
  make(place, "p", card.statement);
  make(place, "p", `Source: ${card.source}`, { class: "note" });
  data.models.forEach((model, i) => {
    if (!card.models[i]) return;
    const block = make(place, "div", null, { class: "model" });
    if (several) make(block, "h4", nameOf(model));
    writeVerdict(block, card.models[i], several ? "h5" : "h4");
  });
}
for (const model of data.models) {
  if (several) make(by("method"), "h3", nameOf(model));
  make(by("method"), "p", model.note);
  if (model.command) make(by("method"), "pre", model.command, { tabindex: "0" });
}
document.documentElement.dataset.ready = "true";
