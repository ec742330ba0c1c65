"""Identity: the embedded documents are the bytes that their manifest fixes, in normal form."""

import hashlib
import json
import re
import unicodedata
from importlib.resources import files

import pytest

from wherewhat.errors import TextError
from wherewhat.text.documents import embedded_documents, text_hash

DATA = files("wherewhat.text") / "data"
MANIFEST = json.loads((DATA / "documents.json").read_bytes())["documents"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["name"])
def test_file_is_what_the_manifest_says(entry):
    data = (DATA / entry["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    text = data.decode("utf-8")
    assert len(text) == entry["chars"]
    assert 37_000 <= len(text) < 40_000
    assert entry["file"] == f"{entry['name']}.txt"
    assert set(entry) == {"name", "file", "title", "author", "chapters", "source", "chars", "sha256"}


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["name"])
def test_text_is_in_normal_form(entry):
    text = (DATA / entry["file"]).read_bytes().decode("utf-8")
    assert unicodedata.is_normalized("NFC", text)
    assert all(char == "\n" or char.isprintable() for char in text)
    assert "_" not in text
    assert "  " not in text
    paragraphs = text.removesuffix("\n").split("\n\n")
    assert all(part and part == part.strip() and "\n" not in part for part in paragraphs)
    assert re.fullmatch(r"(?i)chapter [ivxlc\d]+(\. .+)?", paragraphs[0])
    # Every tokenizer in use makes at least one token of a word, so 6,000 words are 6,000 tokens.
    assert len(text.split()) >= 6_000


def test_manifest_and_folder_agree():
    listed = {entry["file"] for entry in MANIFEST}
    assert listed == {item.name for item in DATA.iterdir() if item.name.endswith(".txt")}
    assert len(MANIFEST) == 16
    assert 450_000 <= sum(entry["chars"] for entry in MANIFEST) <= 600_000


def test_documents_share_no_paragraph_of_prose():
    seen = set()
    for document in embedded_documents():
        long_ones = {part for part in document.text.split("\n\n") if len(part) > 100}
        assert not seen & long_ones
        seen |= long_ones


def test_order_alternates_the_authors():
    authors = [entry["author"] for entry in MANIFEST]
    assert authors == ["Herman Melville", "Jane Austen"] * 8


def test_documents_are_the_files():
    documents = embedded_documents()
    assert [document.name for document in documents] == [entry["name"] for entry in MANIFEST]
    assert [document.sha256 for document in documents] == [entry["sha256"] for entry in MANIFEST]
    assert {document.source for document in documents} == {"embedded"}
    assert embedded_documents(3) == documents[:3]
    assert text_hash(embedded_documents(3)) == text_hash(documents[:3])


@pytest.mark.parametrize(("count", "words"), [(0, "1 or more"), (-2, "1 or more"), (17, "only 16")])
def test_count_out_of_range(count, words):
    with pytest.raises(TextError, match=words):
        embedded_documents(count)


@pytest.mark.parametrize("damage", ["altered", "missing", "manifest"])
def test_damaged_installation(tmp_path, monkeypatch, damage):
    folder = tmp_path / "data"
    folder.mkdir()
    for entry in MANIFEST:
        (folder / entry["file"]).write_bytes((DATA / entry["file"]).read_bytes())
    (folder / "documents.json").write_bytes((DATA / "documents.json").read_bytes())
    monkeypatch.setattr("wherewhat.text.documents.files", lambda package: tmp_path)
    assert len(embedded_documents()) == 16
    if damage == "altered":
        (folder / "emma-01.txt").write_bytes(b"x")
    elif damage == "missing":
        (folder / "emma-01.txt").unlink()
    else:
        (folder / "documents.json").write_bytes(b"[]")
    with pytest.raises(TextError, match="install the package again"):
        embedded_documents()
