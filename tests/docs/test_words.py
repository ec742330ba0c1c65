"""Identity: commands, folders, figures and files named in README, CONTRIBUTING and the pages exist."""

from __future__ import annotations

import ast
import pydoc
import re
import tomllib
from dataclasses import fields
from typing import Any

import pytest
import typer
import yaml

from helpers.pages import PAGES, ROOT, blocks
from wherewhat.measures.registry import measurements
from wherewhat.report.figures import FIGURES

SOURCE = ROOT / "src" / "wherewhat"
FOLDERS = sorted(folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").is_file())

AVOIDED = ("by itself", "by themselves", "habit", "make of", "makes of", "so many", "twins?", "what becomes", "whoever")
"""Words of an earlier style of this documentation, for which the glossary or plain English has better ones."""


def table() -> dict[str, set[str]]:
    """The folders that each folder imports according to CONTRIBUTING, in its order."""
    said: dict[str, set[str]] = {}
    for line in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines():
        if found := re.match(r"\| `(\w+)/` \|.*\|([^|]*)\|$", line):
            said[found[1]] = set(re.findall(r"`(\w+)`", found[2]))
    return said


def imported(folder: str) -> set[str]:
    """The folders of the package that a folder imports, anywhere in its files."""
    names: set[str] = set()
    for file in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    ours = {name.split(".")[1] for name in names if name.startswith("wherewhat.")}
    return (ours & set(FOLDERS)) - {folder}


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


def test_contributing_names_every_folder():
    assert sorted(table()) == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_contributing_says(folder):
    assert imported(folder) == table()[folder]


def test_folders_import_only_folders_above_them():
    order = list(table())
    assert [(a, b) for a in order for b in imported(a) if order.index(b) > order.index(a)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_command_is_named(page):
    text = (ROOT / page).read_text("utf-8")
    # A measurement without a page is listed in docs/measurements.md, which is generated.
    unpaged = {m.name for m in measurements().values() if not (ROOT / "docs" / f"{m.page or m.name}.md").is_file()}
    named = [name for name in commands() if " " not in name and name not in unpaged]
    assert [name for name in named if f"`wherewhat {name}" not in text] == []


def test_commands_that_pages_show_exist_with_their_options():
    known, wrong = commands(), []
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


def test_figures_have_their_lines():
    named = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "figures.md").read_text("utf-8"), re.MULTILINE)
    assert named == list(FIGURES)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "llms.txt"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text("utf-8")
    targets = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)\"", text)
    local = [a or b for a, b in targets if not (a or b).startswith("http")]
    assert [target for target in local if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_checkout_that_a_page_names_exist(page):
    named = re.findall(r"(?:benchmarks|tools|tests|recipes|src)/[\w/.-]*\w", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_plain_english(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(rf"\b(?:{'|'.join(AVOIDED)})\b", text, re.IGNORECASE)
    assert found == (["twin"] if page.name == "CHANGELOG.md" else [])


def test_citation_names_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert f"[{citation['version']}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_llms_txt_names_every_page():
    text = (ROOT / "llms.txt").read_text("utf-8")
    pages = [page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if f"({page})" not in text] == []


def test_objects_that_api_pages_name_exist():
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    named = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert [name for name in named if pydoc.locate(name) is None] == []
