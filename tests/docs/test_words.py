"""Identity: commands, folders, figures, options and files named in README, CONTRIBUTING and the pages exist."""

from __future__ import annotations

import pydoc
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
import yaml

import wherewhat
import wherewhat.errors
from helpers.pages import PAGES, ROOT, blocks
from test_architecture import LAYERS, edges
from wherewhat.lengths import METHODS, find_method
from wherewhat.measures.measurement import all_metrics, measurements
from wherewhat.report.figures import FIGURES
from wherewhat.report.views import view_of

DOCS = ROOT / "docs"


def read(*names: str) -> str:
    return ROOT.joinpath(*names).read_text("utf-8")


def page_of(measurement) -> Path:
    return DOCS / f"{view_of(measurement).page or measurement.name}.md"


def listed(nav) -> list[str]:
    """All pages below an entry of the nav."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in listed(entry)]


def commands() -> dict[str, Any]:
    """Commands and subcommands by name, such as ``multihop train``."""
    from wherewhat.cli.main import build

    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(build()).commands.items():  # type: ignore[attr-defined]
        found |= {name: command} | {f"{name} {sub}": it for sub, it in getattr(command, "commands", {}).items()}
    return found


def shown() -> list[tuple[str, str]]:
    """Every command that a page shows, with the page."""
    inline = re.compile(r"(?:`|^    )(wherewhat [a-z][^`\n#]*)", re.MULTILINE)
    fenced = re.compile(r"^(?:\$ )?(wherewhat [a-z][^\n#]*)", re.MULTILINE)
    found = []
    for page in PAGES:
        consoles = "\n".join(block.code for block in blocks(page) if block.language in ("", "console"))
        lines = inline.findall(page.read_text("utf-8")) + fenced.findall(consoles)
        found += [(page.name, line) for line in lines]
    return found


def test_the_table_of_contributing_equals_the_imports():
    said: dict[str, set[str]] = {}
    for line in read("CONTRIBUTING.md").splitlines():
        if found := re.match(r"\| `(\w+)/` \|.*\|([^|]*)\|$", line):
            said[found[1]] = set(re.findall(r"`(\w+)`", found[2]))
    assert list(said) == list(LAYERS)
    assert said == {layer: {b for a, b in edges() if a == layer and b in LAYERS} for layer in LAYERS}


def test_commands_are_named_and_those_that_pages_show_exist_with_their_options():
    known, wrong = commands(), []
    # A measurement without a page is listed in docs/measurements.md, which is generated.
    unpaged = {one.name for one in measurements().values() if not page_of(one).is_file()}
    named = [name for name in known if " " not in name and name not in unpaged]
    for page in ("README.md", "docs/index.md"):
        assert [name for name in named if f"`wherewhat {name}" not in read(page)] == [], page
    assert len(shown()) > 60
    for page, line in shown():
        words = line.split()[1:]
        command = known.get(" ".join(words[:2])) or known.get(words[0])
        if command is None:
            wrong.append((page, line))
            continue
        options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        wrong += [(page, line, name) for name in given - options - {"--help"}]
        if words[0] in measurements():
            own = {field.name for field in fields(measurements()[words[0]].config)}
            wrong += [(page, line, name) for name in re.findall(r"--set (\w+)=", line) if name not in own]
    assert wrong == []


def test_the_table_of_tolerances_names_files_of_tests():
    """A name without a folder is in that of the name before it."""
    missing, rows = [], re.findall(r"^\| ([\w/, ]+) \|", read("tests", "helpers", "tolerance.py"), re.MULTILINE)[1:]
    assert len(rows) > 30
    for row in rows:
        folder = ""
        for name in row.split(", "):
            folder = name.rpartition("/")[0] or folder
            files = [
                ROOT / "tests" / name,
                *(ROOT / "tests" / folder / f"{name.rpartition('/')[2]}{end}" for end in ("", ".py")),
            ]
            missing += [] if any(file.exists() for file in files) else [(row, name)]
    assert missing == []


def test_files_and_objects_that_pages_name_exist():
    missing = []
    for page in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "llms.txt"):
        targets = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)\"", read(page))
        local = [a or b for a, b in targets if not (a or b).startswith("http")]
        missing += [(page, target) for target in local if not (ROOT / target).exists()]
    for page in PAGES:
        named = re.findall(r"(?:benchmarks|tools|tests|recipes|src)/[\w/.-]*\w", page.read_text("utf-8"))
        missing += [(page.name, name) for name in named if not (ROOT / name).exists()]
    for page in (DOCS / "api").glob("*.md"):
        named = re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
        missing += [(page.name, name) for name in named if pydoc.locate(name) is None]
    assert missing == []


def test_every_public_name_is_documented():
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    documented |= set(vars(wherewhat.errors))  # the whole module is on the page
    for module in (wherewhat, wherewhat.lengths):
        assert [name for name in module.__all__ if name not in documented and name != "lengths"] == []


def test_lists_of_pages_are_complete():
    assert [page.name for page in sorted(DOCS.glob("*.md")) if f"(docs/{page.name})" not in read("llms.txt")] == []
    nav = yaml.safe_load(read("mkdocs.yml"))["nav"]
    pages = listed(nav)
    assert [page for page in pages if not (DOCS / page).is_file()] == []
    assert len(pages) == len(set(pages))
    assert re.findall(r"^\| `(\w+)` \|", read("docs", "figures.md"), re.MULTILINE) == list(FIGURES)
    of_measurements = next(listed(entry["Measurements"]) for entry in nav if "Measurements" in entry)
    for measurement in measurements().values():
        if page_of(measurement).is_file():
            text = page_of(measurement).read_text("utf-8")
            assert page_of(measurement).name in of_measurements
            assert f"wherewhat {measurement.name}" in text
            names = [one.name for one in (*measurement.metrics, *fields(measurement.config))]
            assert [name for name in names if f"`{name}`" not in text] == [], measurement.name


def test_the_page_of_length_methods_states_each_rule_as_its_docstring_does():
    for name in METHODS:
        method = find_method(name)
        assert method.name == name
        assert method.rule().endswith("."), name
        assert f"| `{name}` | {method.rule()} |" in read("docs", "extend.md")


def test_citation_names_the_version_and_the_licence():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == tomllib.loads(read("pyproject.toml"))["project"]["license"]
    assert f"[{citation['version']}]" in read("CHANGELOG.md")


ONE_OF_EACH: dict[str, dict[str, Any]] = {
    "extend": {"methods": ("yarn",), "depths": (50,), "retrieval": True},
    "perturb": {"kinds": ("words",), "rates": (0.05,)},
    "choices": {"kinds": ("words",), "rates": (0.05,)},
    "prompts": {"kinds": ("binding",), "sizes": (16,)},
    "frequencies": {"bands": 1, "massive": True, "unrotate": True},
}
"""Options with which each metric that depends on them exists once, as the pages name it."""


def test_every_metric_is_documented():
    for measurement in measurements().values():
        named = set(re.findall("`([^`\n]+)`", page_of(measurement).read_text("utf-8").replace("band_i", "band_1")))
        config = measurement.config(**ONE_OF_EACH.get(measurement.name, {}))
        assert [metric.name for metric in all_metrics(measurement, config) if metric.name not in named] == []
