// The page of a report whose measurements are not all made: what is still to come and when, and a way to load it again.
const UNFINISHED = stored.unfinished;
const PARTS = { heads: "scatter", distance: "distance-part", frequencies: "bands-part", perturb: "perturbation-part", extend: "length-part" };
const clock = (seconds) => new Date(UNFINISHED.written + 1000 * seconds).toLocaleTimeString([], { timeStyle: "short" });
function writeUnfinished() {
  for (const line of document.querySelectorAll(".to-come")) line.remove();
  // Runs to come are those of the model that is measured last.
  if (!UNFINISHED || chosen.model < all.models.length - 1) return;
  const say = (runs, place) => {
    if (!runs.length) return;
    const names = runs.map(({ name, weights, seconds }) => `${name}${weights === data.model.weights ? "" : ` of the ${weights} control`} at about ${clock(seconds)}`);
    const line = make(document.body, "p", `Still to come: ${names.join(", ")}.`, { class: "note to-come" });
    place.before(line);
    line.closest("section").hidden = false;
  };
  const placed = (run) => run.weights === data.model.weights && PARTS[run.name];
  for (const run of UNFINISHED.coming.filter(placed)) say([run], by(PARTS[run.name]));
  say(UNFINISHED.coming.filter((run) => !placed(run)), by("numbers"));
  if (!data.swaps) by("plane-note").textContent = "";
}
function startUnfinished() {
  if (!UNFINISHED) return;
  const { done, count, left, coming, written } = UNFINISHED;
  const bar = by("unfinished");
  bar.hidden = false;
  // The button comes first, so that another text does not move it away from the pointer.
  make(bar, "button", "Reload", { type: "button" }).addEventListener("click", () => {
    saveNow();
    location.reload();
  });
  const text = make(bar, "span", `This page is being completed: ${done} of ${count} measurements by ${clock(0)}, all by about ${clock(left)}. `);
  setTimeout(() => {
    text.textContent = "There should be more by now. Reloading keeps your selection; if nothing changes, the same command resumes the work. ";
  }, Math.max(1000, written + 1000 * Math.max(10, coming[0].seconds) - Date.now()));
}
