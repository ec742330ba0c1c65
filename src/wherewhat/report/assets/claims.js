// Claims of papers judged on the model, from the newest file of wherewhat claims in the same folder.
function writeClaims() {
  by("claims").hidden = !data.claims;
  if (!data.claims) return;
  by("claims-note").textContent = data.claims.note;
  const cell = (texts) => {
    const place = document.createElement("div");
    for (const text of texts) make(place, "div", text);
    return place;
  };
  table(by("claims-table"),
    ["claim", "number; control", "verdict", "rule", "what would change it"],
    data.claims.rows.map((row) => [
      `${row.number}. ${row.statement} (${row.source})`,
      cell(row.numbers.map((number) => `${number.title}: ${withInterval(number)}${number.control === null ? "" : `; ${number.control_title}: ${fixed(number.control)}`}`)),
      cell([row.verdict, ...row.notes]),
      cell(row.parts.map((part) => `${part.statement}: ${{ true: "yes", false: "no", null: "open" }[part.outcome]}`)),
      row.change,
    ]));
  const command = by("claims-command");
  command.hidden = !data.claims.command;
  command.textContent = data.claims.command;
}
