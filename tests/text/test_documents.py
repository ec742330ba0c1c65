"""Identity: hashes, unique names and the message for a short document."""

import ast
import hashlib
import sys
from pathlib import Path

import pytest

import wherewhat.text
from wherewhat.text.documents import Document, text_hash, with_unique_names


def documents(*pairs):
    return [Document(name, text, "somewhere") for name, text in pairs]


def test_sha256_is_of_the_utf8_text():
    assert Document("a", "né\n", "x").sha256 == hashlib.sha256(b"n\xc3\xa9\n").hexdigest()


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


def test_text_hash_does_not_change_between_releases():
    expected = hashlib.sha256(b"\0" * 7 + b"\x01a" + hashlib.sha256(b"x\n").digest()).hexdigest()
    assert text_hash(documents(("a", "x\n"))) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a", "a"], ["a", "a-2", "a-3"]),
        (["a", "a", "a-2"], ["a", "a-3", "a-2"]),
        (["a-2", "a", "a"], ["a-2", "a", "a-3"]),
        (["a-2", "a-2"], ["a-2", "a-2-2"]),
    ],
)
def test_unique_names(names, expected):
    result = with_unique_names(documents(*((name, "x") for name in names)))
    assert [document.name for document in result] == expected


def test_imports_are_the_standard_library_alone():
    for path in Path(wherewhat.text.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or name.startswith(
                    ("wherewhat.text", "wherewhat.errors", "wherewhat.options", "wherewhat.boundary")
                )
