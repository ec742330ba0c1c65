// The first picture: all heads by positional and symbolic score, and the heads of a control model in grey.
const HERO = { side: 200, edge: 22 };
const heroX = (score) => HERO.edge + score * (HERO.side - HERO.edge - 6);
const heroY = (score) => 6 + (1 - score) * (HERO.side - HERO.edge - 6);
// Scores without the sink of all heads that have them.
function heroHeads(weights) {
  const [pos, sym] = ["s_pos_no_sink", "s_sym_no_sink"].map((id) => data.metrics.find((metric) => metric.id === id)?.values[weights]);
  if (!pos || !sym) return [];
  const heads = pos.flatMap((row, l) => (row ?? []).map((_, h) => ({ l, h, x: row[h], y: sym[l]?.[h] ?? null })));
  return heads.filter(({ x, y }) => x !== null && y !== null);
}
const heroControl = () => WEIGHTS.find((weights) => weights !== data.model.weights && heroHeads(weights).length);
function drawHero() {
  const canvas = by("hero");
  const ratio = devicePixelRatio || 1;
  canvas.width = canvas.height = HERO.side * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const [ink, line, accent] = ["--soft", "--line", "--accent"].map((name) => style.getPropertyValue(name));
  pen.strokeStyle = line;
  pen.strokeRect(heroX(0), heroY(1), heroX(1) - heroX(0), heroY(0) - heroY(1));
  const dots = (heads, colour, alpha) => {
    [pen.fillStyle, pen.globalAlpha] = [colour, alpha];
    for (const { x, y } of heads) {
      pen.beginPath();
      pen.arc(heroX(x), heroY(y), 2.5, 0, 2 * Math.PI);
      pen.fill();
    }
  };
  dots(heroHeads(heroControl()), "#999999", 0.5);
  dots(heroHeads(data.model.weights), accent, 0.75);
  [pen.fillStyle, pen.globalAlpha, pen.font, pen.textAlign] = [ink, 1, "11px system-ui, sans-serif", "center"];
  pen.fillText("positional score →", HERO.side / 2 + 8, HERO.side - 6);
  pen.rotate(-Math.PI / 2);
  pen.fillText("symbolic score →", -HERO.side / 2 + 8, 13);
}
function writeHero() {
  by("hero-figure").hidden = !heroHeads(data.model.weights).length;
  const control = heroControl();
  by("hero-note").textContent = `Every head by its two scores${control ? `; grey: the heads of one ${control} control` : ""}.`;
}
function startHero() {
  chart("hero", drawHero, { downloads: false });
  by("hero").addEventListener("click", (event) => {
    const scale = HERO.side / by("hero").clientWidth;
    const away = ({ x, y }) => Math.hypot(heroX(x) - event.offsetX * scale, heroY(y) - event.offsetY * scale);
    const nearest = heroHeads(data.model.weights).reduce((best, head) => (away(head) < away(best) ? head : best));
    if (away(nearest) > 8) return;
    choose(nearest.l, nearest.h);
    by("panel").scrollIntoView();
  });
}
