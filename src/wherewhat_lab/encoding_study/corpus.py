"""The study's text as bytes, split into training and held-out text, and fixed windows of the latter."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from wherewhat.boundary import read_stream, read_user_file, shown
from wherewhat.errors import ConfigError, TextError
from wherewhat.measures.measurement import Spans, Text
from wherewhat.text.documents import MAX_BYTES, embedded_documents
from wherewhat_lab.language import VOCABULARY
from wherewhat_lab.steps import derived_seed

_GZIP = b"\x1f\x8b"
_COMMON = 1e-4
"""Smallest share of the text of a byte that random sequences use."""


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Attributes:
        training: Bytes to train on, ``(N,)`` uint8.
        held_out: Bytes after those, never trained on, ``(M,)`` uint8.
        sha256: Of all bytes together.
        source: Name of the file, or ``embedded``.
    """

    training: Tensor
    held_out: Tensor
    sha256: str
    source: str

    def windows(self, count: int, length: int, *, seed: int) -> Tensor:
        """Return held-out windows, ``(count, length)`` int64: a random one in each of ``count`` equal parts."""
        spare = len(self.held_out) - length
        if spare < 0:
            raise TextError(
                f"{len(self.held_out)} held-out bytes are fewer than the {length} of a window: give a longer text, or "
                "hold out a larger share"
            )
        generator = torch.Generator().manual_seed(derived_seed(seed, "windows", count, length))
        at = (torch.arange(count) + torch.rand(count, generator=generator, dtype=torch.float64)) / count
        starts = (at * spare).long()
        return self.held_out[starts[:, None] + torch.arange(length)].long()

    def repeats(self, count: int, length: int, *, seed: int) -> Tensor:
        """Return random bytes whose second half repeats the first, ``(count, length)`` int64.

        Bytes are drawn uniformly from those with a share of at least 1e-4 of the training text, so that the model knows
        all of them.
        """
        frequent = torch.bincount(self.training, minlength=VOCABULARY).double() / len(self.training)
        letters = (frequent >= _COMMON).nonzero()[:, 0]
        generator = torch.Generator().manual_seed(derived_seed(seed, "repeats", count, length))
        half = letters[torch.randint(len(letters), (count, -(-length // 2)), generator=generator)]
        return torch.cat([half, half], 1)[:, :length]


def read_corpus(path: Path | None, *, held_out: float, most: int = 0) -> Corpus:
    """Read a text from a file, plain or compressed by gzip, or the embedded prose.

    Args:
        path: The file; None for the embedded prose.
        held_out: Share at the end that is held out.
        most: Number of bytes to use, from the start; 0 for all.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out is {held_out}: give a share of the text between 0 and 1")
    if path is None:
        data = "\n\n".join(document.text for document in embedded_documents()).encode()
        source = "embedded"
    else:
        data, source = _read(path), path.name
    data = data[:most] if most else data
    cut = round(len(data) * (1 - held_out))
    if not 0 < cut < len(data):
        raise TextError(f"{source} holds {len(data)} bytes, too few to train on and hold some out: give a longer text")
    everything = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Corpus(everything[:cut], everything[cut:], hashlib.sha256(data).hexdigest(), source)


def spanned(ids: Tensor) -> Text:
    """Return bytes ``(n,)`` with the spans of their words, which are separated by white space."""
    content = bytes(ids.tolist())
    spans = [match.span() for match in re.finditer(rb"\S+", content)]
    # Words that may be cut by the edges of a window are left out.
    words = tuple((start, end) for start, end in spans if start > 0 and end < len(content))
    return Text(ids[None], find_spans=lambda: Spans(words))


def _read(path: Path) -> bytes:
    try:
        data = read_user_file(path, name="text", most=MAX_BYTES, error=TextError)
        if data[:2] != _GZIP:
            return data
        with gzip.open(io.BytesIO(data)) as stream:
            return read_stream(cast("BinaryIO", stream), name=f"text {shown(path)}", most=MAX_BYTES, error=TextError)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TextError(f"text {path} is a damaged gzip file ({error}): fetch it again") from error
