// The page of one measurement.
setDark(matchMedia("(prefers-color-scheme: dark)").matches);
by("title").textContent = all.title;
writeOthers();
writeMethod();
startTheme(redrawAll);
document.documentElement.dataset.ready = "true";
