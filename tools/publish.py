"""Write the address of a published repository into README, notebooks, metadata and citation.

    python tools/publish.py OWNER/NAME

Each notebook gets a badge that opens it in Colab, and installs from that repository; README gets a badge for each
notebook and the ``uvx`` command with the address. Run again with another address, it replaces the first.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_BADGE_LINE = re.compile(r"^\[!\[Open in Colab\].*\n\n?", re.MULTILINE)
_INSTALL = re.compile(r"%pip install --quiet \"wherewhat\[notebook\][^\"\n]*\"")
_ADDRESS = re.compile(r"git\+[^\s`]+")


def badge(repository: str, notebook: str) -> str:
    """Return a badge in Markdown that opens a notebook of the repository in Colab."""
    target = f"https://colab.research.google.com/github/{repository}/blob/main/notebooks/{notebook}"
    return f"[![Open in Colab]({BADGE})]({target})"


def publish(root: Path, repository: str) -> None:
    """Write the address into the files below a checkout."""
    address = f"git+https://github.com/{repository}"
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        write_notebook(path, repository, address)
    readme = root / "README.md"
    text = readme.read_text("utf-8")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        row = re.compile(rf"^(\| \[[^\]]*\]\(notebooks/{path.name}\) \|.*\|)[^|\n]*\|$", re.MULTILINE)
        text = row.sub(lambda found, name=path.name: f"{found[1]} {badge(repository, name)} |", text)
    readme.write_text(_ADDRESS.sub(address, text), "utf-8")
    project = root / "pyproject.toml"
    urls = f'[project.urls]\nRepository = "https://github.com/{repository}"\n\n'
    without = re.sub(r"\[project\.urls\]\n(?:\w+ = .*\n)*\n", "", project.read_text("utf-8"))
    project.write_text(without.replace("[project.scripts]\n", f"{urls}[project.scripts]\n"), "utf-8")
    citation = root / "CITATION.cff"
    without = re.sub(r"^repository-code: .*\n", "", citation.read_text("utf-8"), flags=re.MULTILINE)
    line = f"repository-code: https://github.com/{repository}\n"
    citation.write_text(without.replace("license: ", f"{line}license: ", 1), "utf-8")


def write_notebook(path: Path, repository: str, address: str) -> None:
    """Put the badge before the first line of a notebook, and install from the repository."""
    notebook = json.loads(path.read_text("utf-8"))
    for place, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if place == 0:
            source = f"{badge(repository, path.name)}\n\n{_BADGE_LINE.sub('', source)}"
        elif cell["cell_type"] == "code":
            source = _INSTALL.sub(f'%pip install --quiet "wherewhat[notebook] @ {address}"', source)
        cell["source"] = source.splitlines(keepends=True)
    path.write_text(f"{json.dumps(notebook, indent=1, ensure_ascii=False)}\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch(r"[\w.-]+/[\w.-]+", sys.argv[1]):
        raise SystemExit(__doc__)
    publish(ROOT, sys.argv[1])
