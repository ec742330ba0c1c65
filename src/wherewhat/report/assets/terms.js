// Links from terms to their definitions on this page.
const termLink = (parent, text, id) => make(parent, "a", text, { class: "term", ...(isTerm(id) ? { href: `#term-${id}` } : {}) });
const isTerm = (id) => data.terms.some((term) => term.id === id);
function writeTerms() {
  by("terms").replaceChildren();
  for (const term of data.terms) {
    make(by("terms"), "dt", `${term.title} (${term.measurement})`, { id: `term-${term.id}` });
    make(by("terms"), "dd", term.reading);
  }
  // Terms of measurements that this model does not have are not links.
  for (const link of document.querySelectorAll("a[data-to]")) {
    if (by(link.dataset.to)) link.setAttribute("href", `#${link.dataset.to}`);
    else link.removeAttribute("href");
  }
}
