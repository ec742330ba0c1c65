// The page of attention on texts: one head, the text, and all heads to choose from.
const rows = data.model.layers.flatMap((_, l) => Array.from({ length: data.model.heads[l] }, (_, h) => ({ l, h, shown: true })));
const knownRoles = () => [];
const openHead = choose;
function writePanel() {
  by("h-panel").textContent = `Layer ${data.model.layers[chosen.layer]}, head ${chosen.head}`;
  by("portrait").textContent = portraitOf(chosen.layer, chosen.head)?.portrait ?? "";
  by("layer").value = chosen.layer;
  by("head").value = chosen.head;
  writeView();
  writeText();
}
const redrawPanel = () => redraw("matrix");
function choose(layer, head) {
  const other = data.model.heads[layer] !== by("head").options.length;
  chosen.layer = layer;
  chosen.head = Math.min(head, data.model.heads[layer] - 1);
  if (other) fillHeads();
  writePanel();
  redrawPanel();
  placeThumbnailBox();
  saveView();
}
function write() {
  fill(by("layer"), data.model.layers.map((layer, l) => [l, layer]));
  fillHeads();
  writePanel();
}

[chosen.layer, chosen.head] = all.first;
readView();
setTheme();
by("name").textContent = data.model.name;
document.title = `${data.model.name}: attention`;
by("source").textContent = all.source;
by("notes").textContent = all.notes.join(" ");
write();
startMatrix();
startText();
startThumbnails();
by("layer").addEventListener("change", (event) => choose(+event.target.value, chosen.head));
by("head").addEventListener("change", (event) => choose(chosen.layer, +event.target.value));
listenToView();
document.documentElement.dataset.ready = "true";
