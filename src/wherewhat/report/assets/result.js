// The page of one measurement.
setDark(matchMedia("(prefers-color-scheme: dark)").matches);
by("title").textContent = all.title;
writeOthers();
writeMethod();
by("theme").addEventListener("click", () => {
  setDark(!isDark());
  redrawAll();
});
document.documentElement.dataset.ready = "true";
