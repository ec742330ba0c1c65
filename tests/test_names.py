"""Identity: whatever a model or document is called, its folder stays inside the run directory and apart."""

import pytest

from helpers.runs import open_run, provenance
from wherewhat.errors import StoreError
from wherewhat.files import part_folder_name, run_folder_name, slug
from wherewhat.scores import Scores

HOSTILE = [
    "..",
    ".",
    "",
    "/",
    "../../etc/passwd",
    "/absolute/name",
    "C:\\windows\\system32",
    "a/b/c",
    "Привет мир",
    "日本語",
    "🙂",
    "a=b",
    "line\nbreak",
    "nul\0byte",
    "-rf",
    ".hidden",
    ".tmp-0123456789abcdef",
    "CON",
    "trailing. ",
    "x" * 5000,
    "é" * 5000,
    "Case",
    "case",
]


def test_folder_names_are_plain_readable_and_apart(tmp_path):
    for name in HOSTILE:
        for folder in (part_folder_name(name), run_folder_name(name, "0" * 64)):
            assert len(folder) <= 64, name
            assert folder.isascii(), name
            assert not set(folder) & set("/\\\0\n:=*? "), name
            assert folder[0].isalnum() or folder[0] == "_", name
            assert (tmp_path / folder).resolve().parent == tmp_path.resolve(), name
    assert len({part_folder_name(name).lower() for name in HOSTILE}) == len(HOSTILE)
    assert slug("HuggingFaceTB/SmolLM2-135M", fallback="x") == "HuggingFaceTB-SmolLM2-135M"
    assert slug("Émile Zola", fallback="x") == "Emile-Zola"
    assert slug("日本", fallback="x") == "x"
    with pytest.raises(StoreError, match="not valid Unicode"):
        part_folder_name("bad\udcff")


def test_a_run_with_hostile_parts_stays_in_its_directory(tmp_path):
    run = open_run(tmp_path / "runs")
    with run.lock():
        for key in HOSTILE:
            assert not run.has(key)
            run.save(key, Scores(), seconds=0)
            assert run.has(key)
        run.finish(HOSTILE, provenance=provenance())
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == [run.path]
    assert len(list((run.path / "parts").iterdir())) == len(HOSTILE)
