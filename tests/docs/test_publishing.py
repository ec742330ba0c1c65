"""Identity: the text for language models has every page; an address is written into all files, once."""

from __future__ import annotations

import json
import re
import shutil
import tomllib

import pytest
import yaml

import publish
from helpers.pages import ROOT

COPIED = ("README.md", "pyproject.toml", "CITATION.cff", "notebooks")


@pytest.fixture
def copy(tmp_path):
    for name in COPIED:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


def test_the_full_text_has_every_page_in_order():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")
    from site_hooks import full_text

    text = full_text()
    pages = re.findall(r"^<!-- (\S+\.md) -->$", text, re.MULTILINE)
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in pages] == []
    assert len(pages) == len(set(pages))
    assert text.count("<!--") == len(pages)
    assert "## axes\n" in text  # the generated reference of measurements
    assert all((ROOT / page).is_file() for page in pages)


def test_an_address_is_written_into_all_files_and_replaced(copy):
    publish.publish(copy, "first/try")
    once = {path: path.read_text("utf-8") for path in copy.rglob("*.*") if path.is_file()}
    publish.publish(copy, "someone/wherewhat")
    publish.publish(copy, "first/try")
    assert {path: path.read_text("utf-8") for path in once} == once
    notebooks = sorted(path.name for path in (copy / "notebooks").glob("*.ipynb"))
    readme = once[copy / "README.md"]
    for name in notebooks:
        assert readme.count(publish.badge("first/try", name)) == 1
        notebook = json.loads(once[copy / "notebooks" / name])
        assert "".join(notebook["cells"][0]["source"]).startswith(publish.badge("first/try", name))
        before = json.loads((ROOT / "notebooks" / name).read_text("utf-8"))
        outputs = [cell.get("outputs") for cell in notebook["cells"]]
        assert outputs == [cell.get("outputs") for cell in before["cells"]]
        assert "git+https://github.com/first/try" in once[copy / "notebooks" / name]
    assert "uvx --from git+https://github.com/first/try wherewhat report" in readme
    project = tomllib.loads(once[copy / "pyproject.toml"])["project"]
    assert project["urls"] == {"Repository": "https://github.com/first/try"}
    assert project["scripts"] == {"wherewhat": "wherewhat.__main__:main"}
    assert yaml.safe_load(once[copy / "CITATION.cff"])["repository-code"] == "https://github.com/first/try"


def test_the_dev_container_names_a_target_of_the_makefile():
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8")
    container = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    assert container["postCreateCommand"] == "make .venv/.ready-tools"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "TOOLS := $(VENV)/.ready-tools" in makefile
    assert "$(TOOLS): $(READY)" in makefile
