// 6. Method, limits, provenance and the command.
function writeMethod() {
  by("method").replaceChildren();
  for (const item of data.method) {
    make(by("method"), "dt", item.name, { id: `method-${item.name}` });
    make(by("method"), "dd", `${item.summary} ${item.limits}`);
  }
  by("left-out").textContent = data.left_out.length ? `Left out: ${data.left_out.join("; ")}` : "";
  const others = data.model.unmeasured;
  by("unmeasured").textContent = others.length ? `Not measured, because they have no softmax self-attention: ${others.join("; ")}` : "";
  by("command").textContent = all.command;
  by("command").hidden = !all.command;
  by("no-command").hidden = Boolean(all.command) || !all.learning;
  by("runs").replaceChildren();
  for (const run of data.runs) {
    const details = make(by("runs"), "details");
    make(details, "summary", run.name);
    make(details, "pre", JSON.stringify({ config: run.config, provenance: run.provenance }, null, 1), { tabindex: "0" });
  }
}
