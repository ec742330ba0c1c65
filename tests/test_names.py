"""Identity: whatever a model or document is called, its folder stays inside the run directory and apart."""

import pytest

from helpers.runs import open_run, provenance
from wherewhat.errors import StoreError
from wherewhat.hashes import part_folder_name, run_folder_name, slug
from wherewhat.runs.layout import PartResult

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


@pytest.mark.parametrize("name", HOSTILE)
def test_folder_names_are_plain(name, tmp_path):
    for folder in (part_folder_name(name), run_folder_name(name, "0" * 64)):
        assert len(folder) <= 64
        assert folder.isascii()
        assert not set(folder) & set("/\\\0\n:=*? ")
        assert folder[0].isalnum() or folder[0] == "_"
        assert (tmp_path / folder).resolve().parent == tmp_path.resolve()


def test_different_keys_never_share_a_folder_even_without_case():
    assert len({part_folder_name(name).lower() for name in HOSTILE}) == len(HOSTILE)


def test_slug_keeps_what_is_readable():
    assert slug("HuggingFaceTB/SmolLM2-135M", fallback="x") == "HuggingFaceTB-SmolLM2-135M"
    assert slug("Émile Zola", fallback="x") == "Emile-Zola"
    assert slug("日本", fallback="x") == "x"


def test_a_run_with_hostile_parts_stays_in_its_directory(tmp_path):
    run = open_run(tmp_path / "runs")
    with run.lock():
        for key in HOSTILE:
            assert not run.has(key)
            run.save(key, PartResult(), seconds=0)
            assert run.has(key)
        run.finish(HOSTILE, provenance=provenance())
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == [run.path]
    assert len(list((run.path / "parts").iterdir())) == len(HOSTILE)


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(StoreError, match="not valid Unicode"):
        part_folder_name("bad\udcff")
