"""Identity: hashes and names of documents, and embedded documents that are the bytes which their manifest fixes."""

import hashlib
import json
import re
import unicodedata
from importlib.resources import files

import pytest

from wherewhat.errors import TextError
from wherewhat.text.documents import Document, embedded_documents, text_hash, with_unique_names

DATA = files("wherewhat.text") / "data"
MANIFEST = json.loads((DATA / "documents.json").read_bytes())["documents"]


def documents(*pairs):
    return [Document(name, text, "somewhere") for name, text in pairs]


def test_text_hash_depends_on_names_contents_and_order_only():
    one = documents(("a", "x"), ("b", "y"))
    same = [Document(item.name, item.text, "elsewhere") for item in one]
    assert text_hash(one) == text_hash(same) == text_hash(iter(one))
    others = [
        documents(("b", "y"), ("a", "x")),
        documents(("a", "x")),
        documents(("a", "y"), ("b", "x")),
        documents(("ab", "x"), ("", "y")),
        documents(("a", "x"), ("b", "z")),
        [],
    ]
    assert len({text_hash(item) for item in [one, *others]}) == 7
    assert Document("a", "né\n", "x").sha256 == hashlib.sha256(b"n\xc3\xa9\n").hexdigest()
    # The same in every release.
    expected = hashlib.sha256(b"\0" * 7 + b"\x01a" + hashlib.sha256(b"x\n").digest()).hexdigest()
    assert text_hash(documents(("a", "x\n"))) == expected


UNIQUE = [
    (["a", "b"], ["a", "b"]),
    (["a", "a", "a"], ["a", "a-2", "a-3"]),
    (["a", "a", "a-2"], ["a", "a-3", "a-2"]),
    (["a-2", "a", "a"], ["a-2", "a", "a-3"]),
    (["a-2", "a-2"], ["a-2", "a-2-2"]),
]


def test_unique_names():
    for names, expected in UNIQUE:
        result = with_unique_names(documents(*((name, "x") for name in names)))
        assert [document.name for document in result] == expected


def test_embedded_files_are_what_the_manifest_says_in_normal_form():
    for entry in MANIFEST:
        name = entry["name"]
        data = (DATA / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], name
        text = data.decode("utf-8")
        assert len(text) == entry["chars"], name
        assert 37_000 <= len(text) < 40_000, name
        assert entry["file"] == f"{name}.txt"
        assert set(entry) == {"name", "file", "title", "author", "chapters", "source", "chars", "sha256"}, name
        assert unicodedata.is_normalized("NFC", text), name
        assert all(char == "\n" or char.isprintable() for char in text), name
        assert "_" not in text, name
        assert "  " not in text, name
        paragraphs = text.removesuffix("\n").split("\n\n")
        assert all(part and part == part.strip() and "\n" not in part for part in paragraphs), name
        assert re.fullmatch(r"(?i)chapter [ivxlc\d]+(\. .+)?", paragraphs[0]), name
        # Every tokenizer in use makes at least one token of a word, so 6,000 words are 6,000 tokens.
        assert len(text.split()) >= 6_000, name


def test_embedded_documents_are_the_files_by_two_authors_in_turn():
    assert {entry["file"] for entry in MANIFEST} == {x.name for x in DATA.iterdir() if x.name.endswith(".txt")}
    assert [entry["author"] for entry in MANIFEST] == ["Herman Melville", "Jane Austen"] * 8
    found = embedded_documents()
    assert [document.name for document in found] == [entry["name"] for entry in MANIFEST]
    assert [document.sha256 for document in found] == [entry["sha256"] for entry in MANIFEST]
    assert {document.source for document in found} == {"embedded"}
    assert embedded_documents(3) == found[:3]
    assert text_hash(embedded_documents(3)) == text_hash(found[:3])
    prose = [part for document in found for part in {*document.text.split("\n\n")} if len(part) > 100]
    assert len(prose) == len(set(prose))  # no paragraph is in two documents
    for count, words in ((0, "1 or more"), (-2, "1 or more"), (17, "only 16")):
        with pytest.raises(TextError, match=words):
            embedded_documents(count)


def test_damaged_installation(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("documents.json", *(entry["file"] for entry in MANIFEST)):
        (folder / name).write_bytes((DATA / name).read_bytes())
    monkeypatch.setattr("wherewhat.text.documents.files", lambda package: tmp_path)
    assert len(embedded_documents()) == 16
    for name, content in (("emma-01.txt", b"x"), ("emma-01.txt", None), ("documents.json", b"[]")):
        path = folder / name
        before = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(TextError, match="install the package again"):
            embedded_documents()
        path.write_bytes(before)
    assert len(embedded_documents()) == 16
