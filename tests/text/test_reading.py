"""Brute force: every way to name a text and every way to get it wrong, one by one."""

import io
import json
import os
import re
from pathlib import Path

import pytest

from wherewhat.errors import TextError
from wherewhat.text import documents as reading_module
from wherewhat.text.documents import embedded_documents, read_documents


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)

    return write


def names(documents):
    return [document.name for document in documents]


def texts(documents):
    return [document.text for document in documents]


def refusal(*args, **options):
    with pytest.raises(TextError) as caught:
        read_documents(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    message.encode("utf-8")
    return message


def test_default_is_embedded():
    assert read_documents(None) == read_documents([]) == embedded_documents()
    assert read_documents(None, count=2) == embedded_documents(2)


def test_files_in_order(write):
    one, two = write("one.txt", "first\n"), write("two", "second")
    documents = read_documents([two, one])
    assert names(documents) == ["two", "one"]
    assert texts(documents) == ["second", "first\n"]
    assert [document.source for document in documents] == [two, one]
    assert read_documents([two, one], count=1) == documents[:1]
    for given in (one, Path(one), [Path(one)]):
        assert read_documents(given) == documents[1:]


def test_text_is_kept_but_for_line_ends_and_mark(write):
    path = write("a.txt", b"\xef\xbb\xbf  caf\xc3\xa9 e\xcc\x81\t \r\n\r\nb\rc\x0c\n\n")
    assert texts(read_documents([path])) == ["  café e\u0301\t \n\nb\nc\x0c\n\n"]


def test_folder_gives_its_text_files_by_name(write, tmp_path):
    for name in ("b.txt", "a.TXT", ".hidden.txt", "c.md"):
        write(name, f"content of {name}")
    (tmp_path / "sub.txt").mkdir()
    assert names(read_documents([str(tmp_path)])) == ["a", "b"]
    assert "folder without .txt files" in refusal([str(tmp_path / "sub.txt")])


def test_standard_input(monkeypatch):
    documents = read_documents(["-"], stdin=io.BytesIO(b"piped\r\n"))
    assert [(item.name, item.text, item.source) for item in documents] == [("stdin", "piped\n", "standard input")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert texts(read_documents(["-"])) == ["piped"]


def test_separator_lines(write):
    path = write("two.txt", "<|doc|>\n\nfirst\n\nline\n\n <|doc|> \r\n\n<|doc|>\nsecond <|doc|>")
    plain = write("plain.txt", "\nplain")
    documents = read_documents([path, plain], separator="<|doc|>")
    assert names(documents) == ["two-1", "two-2", "plain"]
    assert texts(documents) == ["first\n\nline\n", "second <|doc|>\n", "\nplain"]


def test_json_lines(write):
    lines = [
        json.dumps({"text": "first\r\n", "name": " a\nb "}),
        "",
        json.dumps({"text": "second\u2028", "id": 7, "more": [1]}, ensure_ascii=False),
        json.dumps({"text": "third"}),
        json.dumps({"text": "fourth", "id": "7", "name": ""}),
    ]
    documents = read_documents([write("set.jsonl", "\n".join(lines))])
    assert names(documents) == ["a b", "7", "set-3", "7-2"]
    assert texts(documents) == ["first\n", "second\u2028", "third", "fourth"]


def test_same_names_are_told_apart(write, tmp_path):
    (tmp_path / "sub").mkdir()
    paths = [write("a.txt", "1"), write("sub/a.txt", "2"), write("a-2.txt", "3")]
    assert names(read_documents(paths)) == ["a", "a-3", "a-2"]


BAD_BYTES = {
    "empty": (b"", "is empty"),
    "mark only": (b"\xef\xbb\xbf", "only white space"),
    "blank": (b" \r\n\t\n", "only white space"),
    "utf-16": ("text".encode("utf-16"), "is UTF-16.*iconv"),
    "utf-16 big-endian": (b"\xfe\xff\0t", "is UTF-16"),
    "utf-32": ("text".encode("utf-32"), "is UTF-32"),
    "utf-16 without mark": ("text".encode("utf-16-le"), "binary.*NUL at byte 1"),
    "latin-1": ("one\r\ntwo\rcafé crème".encode("latin-1"), r"not UTF-8 at byte 12 \(0xe9\), line 3.*iconv"),
    "cut off": (b"line\ncaf\xc3", r"ends inside a UTF-8 character at byte 8 \(0xc3\), line 2"),
    "surrogate": (b"a\xed\xa0\x80b", "not UTF-8 at byte 1"),
    "NUL": (b"text\0text", "binary.*NUL at byte 4"),
    "gguf": (b"GGUF\3\0\0\0", "a GGUF model"),
    "gzip": (b"\x1f\x8b\x08\x00", "gzip"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "a PDF"),
}


def test_bytes_that_are_no_text(write, subtests):
    for case, (data, words) in BAD_BYTES.items():
        with subtests.test(case=case):
            path = write("bad.txt", data)
            message = refusal([path])
            assert message.startswith(f"text '{path}' ")
            assert re.search(words, message)
            assert re.search(f"standard input .*{words}", refusal(["-"], stdin=io.BytesIO(data)))


BAD_JSON_LINES = {
    "syntax": ('{"text": "a"}\n{"text": }\n', "line 2 is not JSON: .* at column 10"),
    "array": ('["text"]', 'line 1 is not an object with a string "text"'),
    "no text": ('\n{"content": "a"}', "line 2 is not an object"),
    "number": ('{"text": 3}', "line 1 is not an object"),
    "blank": ('{"text": " "}', "line 1 has only white space"),
    "NUL": ('{"text": "a\\u0000"}', "line 1 is binary"),
    "half pair": ('{"text": "a\\n\\ud800"}', "line 1 has half of a surrogate pair in line 2"),
    "deep": ("[" * 100_000, "line 1 is not usable JSON"),
    "deep inside": ('{"text": "a", "x": ' + "[" * 70 + "]" * 70 + "}", "line 1 is not usable JSON"),
    "long number": ('{"text": "a", "id": ' + "1" * 5000 + "}", "line 1 is not usable JSON"),
}


def test_json_lines_that_are_wrong(write, subtests, monkeypatch):
    for case, (content, words) in BAD_JSON_LINES.items():
        with subtests.test(case=case):
            assert re.search(words, refusal([write("bad.jsonl", content)]))
    monkeypatch.setattr(reading_module, "MAX_LINES", 3)
    assert "more than 3 lines" in refusal([write("many.jsonl", '{"text": "a"}\n\n\n\n\n')])


def test_missing_file_with_a_hint(write, tmp_path):
    write("chapters.txt", "x")
    assert f"did you mean '{tmp_path / 'chapters.txt'}'?" in refusal([str(tmp_path / "chapter.txt")])
    assert "check the path" in refusal([str(tmp_path / "zzzzzz")])
    assert "nor can the folder" in refusal([str(tmp_path / "no" / "a.txt")])
    assert "does not exist" in refusal([str(tmp_path / "chapters.txt" / "a.txt")])


NAMES = {
    "empty": ("", "is empty: give a file"),
    "blank": (" ", "is empty: give a file"),
    "address": ("https://example.org/a.txt", "web address"),
    "NUL": ("a\0b", "NUL character"),
    "long": ("x" * 5000, "File name too long"),
    "line breaks": ("no\nsuch\u2028file", r"'no\nsuch\u2028file' does not exist"),
    "surrogate": ("no\udcff", r"'no\udcff' does not exist"),
    "home": ("~nosuchuser/x", "home folder of an unknown user"),
}


def test_odd_names(subtests):
    for case, (source, words) in NAMES.items():
        with subtests.test(case=case):
            assert words in refusal([source])


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file names")
def test_file_name_that_is_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_bytes(b"content")
    (document,) = read_documents([os.fsdecode(path)])
    assert document.name == "caf?"
    document.source.encode("utf-8")


def test_no_permission(write, monkeypatch):
    path = write("a.txt", "x")

    def denied(self, *args, **options):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied" in refusal([path])


def test_larger_than_the_limit(write, tmp_path, monkeypatch):
    with (tmp_path / "sparse.txt").open("wb") as stream:
        stream.truncate((1 << 29) + 1)
    assert "at most 512.0 MiB" in refusal([str(tmp_path / "sparse.txt")])  # seen before it is read
    monkeypatch.setattr(reading_module, "MAX_BYTES", 10)
    assert texts(read_documents([write("fits.txt", "0123456789")])) == ["0123456789"]
    assert "at most 10 bytes" in refusal([write("over.txt", "0123456789a")])
    assert "more than 10 bytes" in refusal(["-"], stdin=io.BytesIO(b"0123456789a"))


def test_standard_input_twice_terminal_closed_or_none(monkeypatch):
    class Terminal(io.BytesIO):
        def isatty(self):
            return True

    closed = io.BytesIO(b"x")
    closed.close()
    assert "more than once" in refusal(["-", "-"], stdin=io.BytesIO(b"x"))
    assert "nothing is piped in" in refusal(["-"], stdin=Terminal(b"x"))
    assert "cannot be read" in refusal(["-"], stdin=closed)
    monkeypatch.setattr("sys.stdin", None)
    assert "nothing is piped in" in refusal(["-"])


def test_separator_and_count_that_do_not_fit(write):
    path = write("a.txt", "one\n---\ntwo\n")
    assert "no text to cut" in refusal(None, separator="---")
    assert "is no line of any text" in refusal([path], separator="===")
    assert "is not a single line" in refusal([path], separator=" ")
    assert "is not a single line" in refusal([path], separator="a\nb")
    assert "nothing but separator lines" in refusal([write("b.txt", "---\n \n---\n")], separator="---")
    assert "there are only 2" in refusal([path], separator="---", count=3)
    assert "there is only 1" in refusal([path], count=3)
    assert "1 or more" in refusal([path], count=0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zeros.txt").symlink_to("/dev/zero")
    assert "it is a named pipe" in refusal([str(tmp_path / "pipe.txt")])
    assert "it is a device" in refusal([str(tmp_path / "zeros.txt")])
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    assert "symbolic links" in refusal([str(tmp_path / "loop.txt")])
    assert "folder without .txt files" in refusal([str(tmp_path)])


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="needs /dev/fd")
def test_stream_of_the_shell():
    read, write = os.pipe()
    os.write(write, b"the cat sat")
    os.close(write)
    try:
        assert texts(read_documents([f"/dev/fd/{read}"])) == ["the cat sat"]
    finally:
        os.close(read)
