"""Identity: entry points of a group are loaded by name; a package without metadata has none."""

from __future__ import annotations

import sys
from pathlib import Path

from wherewhat.imports import plugins


def test_entry_points_are_loaded_by_name(tmp_path, monkeypatch):
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[wherewhat.tests]\nb = pathlib:Path\na = sys:maxsize\n")
    assert plugins("wherewhat.tests") == {}
    monkeypatch.syspath_prepend(tmp_path)
    assert list(plugins("wherewhat.tests").items()) == [("a", sys.maxsize), ("b", Path)]


def test_the_laboratory_is_declared():
    import tomllib

    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ]
    assert set(declared["wherewhat.commands"]) == {"encodings", "multihop"}
    for group in declared.values():
        for target in group.values():
            module, _, name = target.partition(":")
            assert hasattr(__import__(module, fromlist=[name]), name)
