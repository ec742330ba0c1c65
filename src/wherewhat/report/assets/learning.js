// 5. Learning curves of trainings.
const study = () => all.learning[+by("study").value || 0];
function startLearning() {
  by("learning").hidden = !all.learning.length;
  if (!all.learning.length) return;
  fill(by("study"), all.learning.map((training, i) => [i, training.title]));
  by("study").addEventListener("change", () => {
    writeLearning();
    redraw("dynamics");
  });
  writeLearning();
  chart("dynamics", () => draw("dynamics", CHARTS.learning[+by("study").value || 0]));
}
function writeLearning() {
  by("learning-note").textContent = study().note;
  table(by("learning-table"), study().table.header, study().table.rows);
}
