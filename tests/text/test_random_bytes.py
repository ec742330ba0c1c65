"""Brute force: random inputs give valid documents or a one-line TextError, nothing else."""

import io
import random

import pytest

from wherewhat.errors import TextError
from wherewhat.text.documents import read_documents

NEAR_TEXT = [b"text", b" ", b"\n", b"\r\n", b"\r", b"---", b"\n---\n", "é—𝄞".encode(), b"\xe2\x80\xa8"]
NEAR_TEXT += [
    "é".encode("latin-1"),
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xc3",
    b"\xf0\x9d",
    b"\x1b\x85\x0c",
]
NEAR_JSON = [b'{"text": "a"}\n', b'{"text": "a", "name": "n"}\r\n', b'\n{"text": "', b'"}\n', b'", "id": "']
NEAR_JSON += [
    b'{"text": "b\\n"}\n',
    b'{"text": "c", "id": 5}\n',
    b"\\ud800",
    b"\\u0000",
    b"[",
    b"\n",
    b" ",
    b"text",
    "é".encode(),
    b"1e999",
]


def random_bytes(source, pieces):
    """Bytes that come near to being valid: pieces that are, pieces that are not, and noise."""
    noise = source.randbytes(source.randint(0, 4))
    return b"".join(source.choices([*pieces, noise], k=source.randint(0, 7)))


def assert_valid(documents):
    assert documents
    assert len({document.name for document in documents}) == len(documents)
    for document in documents:
        assert document.text.strip()
        assert "\r" not in document.text
        assert "\0" not in document.text
        assert document.name.isprintable()
        assert len(document.sha256) == 64


KINDS = [("random.txt", NEAR_TEXT), ("random.txt", NEAR_JSON), ("random.jsonl", NEAR_JSON), ("-", NEAR_TEXT)]


@pytest.mark.parametrize("count", [250, pytest.param(3000, marks=pytest.mark.slow)])
def test_random_bytes_give_documents_or_a_text_error(tmp_path, count):
    for name, pieces in KINDS:
        source = random.Random(20)
        path = tmp_path / name
        messages, valid = [], 0
        for _ in range(count):
            data = random_bytes(source, pieces)
            separator = None if name == "random.jsonl" else source.choice([None, "---"])
            path.write_bytes(data)
            given = "-" if name == "-" else str(path)
            try:
                documents = read_documents([given], stdin=io.BytesIO(data), separator=separator)
            except TextError as error:
                messages.append(str(error))
            else:
                assert_valid(documents)
                valid += 1
        assert all(message.isprintable() for message in messages)
        assert min(valid, len(messages)) > count // 30, name
