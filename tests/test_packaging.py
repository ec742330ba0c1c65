"""Identity: what is built contains the package with its data and nothing else; extras are documented and asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs"}


def package_files() -> set[str]:
    """All files of the package, relative to ``src``."""
    found = (path for path in SOURCE.rglob("*") if path.is_file())
    own = (path for path in found if path.suffix != ".pyc" and path.name != ".gitattributes")
    return {path.relative_to(SOURCE).as_posix() for path in own}


def test_extras_are_documented_asked_for_and_installed_by_developers():
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme[readme.index("| extra | needed for |") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [name for name in EXTRAS if name != "dev"]
    text = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.py"))
    named = set(re.findall(r"(?:pip install |install=\")'wherewhat\[(\w+)\]'", text))
    assert named == EXTRAS.keys() - FOR_DEVELOPERS
    (all_extras,) = [one for one in EXTRAS["dev"] if one.startswith("wherewhat[")]
    assert set(all_extras.removeprefix("wherewhat[").removesuffix("]").split(",")) == EXTRAS.keys() - {"dev"}


def test_packages_are_pinned_for_tests_and_python_versions_declared():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    needed = {re.match(r"[\w-]+", one)[0].lower() for extra in EXTRAS.values() for one in extra}
    needed |= {re.match(r"[\w-]+", one)[0].lower() for one in PROJECT["dependencies"]}
    assert needed - {"wherewhat"} <= pinned
    versions = re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert versions == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={versions[0]}"


@pytest.mark.slow
def test_what_is_built_has_the_package_and_nothing_else(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_size < 2_000_000 for path in tmp_path.iterdir())

    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        info = f"wherewhat-{PROJECT['version']}.dist-info/"
        extra = {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
        assert set(wheel.namelist()) == package_files() | extra
        metadata = message_from_string(wheel.read(f"{info}METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS.keys()
    for needed in ("models/data/catalog.json", "report/assets/page.html", "text/data/documents.json", "py.typed"):
        assert f"wherewhat/{needed}" in package_files()

    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO", ".gitignore"}
    assert names == {f"src/{name}" for name in package_files()} | beside
