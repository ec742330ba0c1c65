// Claims of papers judged on the model, from the newest file of wherewhat claims in the same folder.
function writeClaims() {
  by("claims").hidden = !data.claims;
  if (!data.claims) return;
  by("claims-note").textContent = data.claims.note;
  const place = by("claims-list");
  place.replaceChildren();
  for (const claim of data.claims.claims) {
    const card = make(place, "article", null, { class: "claim" });
    make(card, "h3", `${claim.number}. ${claim.title}`);
    make(card, "p", `${claim.statement} (${claim.source})`);
    writeVerdict(card, claim, "h4");
  }
  const command = by("claims-command");
  command.hidden = !data.claims.command;
  command.textContent = data.claims.command;
}
