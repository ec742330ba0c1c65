// The page of a report whose measurements are not all made: what is still to come and when, and a way to load it again.
const UNFINISHED = stored.unfinished;
const PARTS = { heads: "scatter", distance: "distance-part", frequencies: "bands-part", perturb: "perturbation-part", extend: "length-part" };
const clock = (seconds) => new Date(UNFINISHED.written + 1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
function writeUnfinished() {
  for (const line of document.querySelectorAll(".to-come")) line.remove();
  // Runs to come are those of the model that is measured last.
  if (!UNFINISHED || chosen.model < all.models.length - 1) return;
  for (const { name, weights, seconds } of UNFINISHED.coming) {
    if (weights !== data.model.weights || !PARTS[name]) continue;
    const line = make(document.body, "p", `Still to come, at about ${clock(seconds)}: ${name}.`, { class: "note to-come" });
    by(PARTS[name]).before(line);
    line.closest("section").hidden = false;
    if (name === "heads") by("plane-note").textContent = "";
  }
}
function startUnfinished() {
  if (!UNFINISHED) return;
  const { done, count, left, coming } = UNFINISHED;
  const bar = by("unfinished");
  bar.hidden = false;
  const names = coming.map(({ name, weights, seconds }) => `${name} (${weights}) at ${clock(seconds)}`).join(", ");
  const text = make(bar, "span", `This page is being completed: ${done} of ${count} measurements at ${clock(0)}, all at about ${clock(left)}. `, { title: `Still to come: ${names}` });
  make(bar, "button", "Reload", { type: "button" }).addEventListener("click", () => location.reload());
  const wait = Math.max(10, coming[0].seconds) * 1000 - (Date.now() - UNFINISHED.written);
  setTimeout(() => {
    text.textContent = "More of this page should be there by now; reloading keeps your selection. If it does not change, the command was interrupted: the same command resumes the work. ";
  }, Math.max(1000, wait));
}
