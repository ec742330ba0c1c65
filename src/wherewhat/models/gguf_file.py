"""GGUF files: settings and tensors located in their bytes, and tensors de-quantised to float32."""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wherewhat.imports import require

# Numbers of types in GGUF files, and NumPy's types of those of fixed size.
_STRING, _LIST = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
_ALIGNMENT = "general.alignment"
# Entries that are de-quantised together: their intermediate arrays stay in the cache of a core.
_TOGETHER = 1 << 16
# Bytes between the starts of tensors in memory are a multiple of this, as in torch.
_ALIGNED = 64


@dataclass(frozen=True)
class Setting:
    """A setting, with the attributes of ``gguf.ReaderField`` that transformers reads.

    Attributes:
        types: Number of its type; for a list also that of its entries.
        parts: Bytes of each string, or an array ``(n, 1)`` of numbers.
    """

    types: list[int]
    parts: Sequence[Any]

    @property
    def data(self) -> range:
        """Indices of the entries in ``parts``."""
        return range(len(self.parts))

    def value(self) -> Any:
        """Return the value, or the list of values."""
        values = [part.decode() if isinstance(part, bytes) else part[0].item() for part in self.parts]
        return values if self.types[0] == _LIST else values[0]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, with the attributes of ``gguf.ReaderTensor`` that transformers reads.

    Attributes:
        name: Name in llama.cpp's convention, such as ``blk.0.attn_q.weight``.
        tensor_type: Its ``gguf.GGMLQuantizationType``.
        n_elements: Number of entries.
        data: Read-only view of the file: entries, or the bytes of blocks along the last axis.
    """

    name: str
    tensor_type: Any
    n_elements: int
    data: np.ndarray[Any, Any]


class GgufFile:
    """Settings and tensors of a GGUF file, each checked to end inside the file.

    ``gguf.GGUFReader`` reads the same, with an array for each entry of a list: 20 s for the vocabulary of Gemma.

    Attributes:
        fields: Settings by name, in the order of the file.
        tensors: Tensors in the order of the file.

    Raises:
        Exception: Of any kind for damaged files.
    """

    def __init__(self, path: Path) -> None:
        self._gguf: Any = require("gguf", why="reading GGUF files")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4  # behind the letters GGUF
        version, tensors, settings = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of GGUF is not 2 or 3")
        self.fields: dict[str, Setting] = {}
        for _ in range(settings):
            name = self._string().decode()
            if name in self.fields:
                raise ValueError(f"two settings {name!r}")
            self.fields[name] = self._setting()
        entries = [self._entry() for _ in range(tensors)]
        alignment = self.fields[_ALIGNMENT].value() if _ALIGNMENT in self.fields else 32
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment!r} bytes, which is no power of two")
        start = math.ceil(self._at / alignment) * alignment
        self.tensors = [self._tensor(start, *entry) for entry in entries]
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("two tensors of the same name")

    def _numbers(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> bytes:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[bytes]:
        data, at, length = self._data, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):  # beyond the end of the file, ``length`` raises an error
            (size,) = length(data, at)
            at += 8 + size
            strings.append(data[at - size : at])
        self._check(at)
        self._at = at
        return strings

    def _setting(self) -> Setting:
        (kind,), length = self._numbers("I"), 1
        types = [kind]
        if kind == _LIST:
            kind, length = self._numbers("IQ")
            types.append(kind)
        if kind == _STRING:
            return Setting(types, self._strings(length))
        if kind not in _NUMBERS:
            raise ValueError(f"a setting of type {kind}")
        dtype, start = np.dtype(_NUMBERS[kind]), self._at
        self._at += length * dtype.itemsize
        self._check(self._at)
        return Setting(types, np.ndarray((length, 1), dtype, self._data, start))  # type: ignore[arg-type]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = self._numbers(f"{dimensions}Q")[::-1]
        kind, offset = self._numbers("IQ")
        return name, shape, kind, offset

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> StoredTensor:
        kind, elements = self._gguf.GGMLQuantizationType(number), math.prod(shape)
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"rows of {shape[-1]} entries in {name!r}, in blocks of {block}")
        start += offset
        self._check(start + elements // block * size)
        dtype = _PLAIN.get(kind.name)
        if dtype is None:
            shape = (*shape[:-1], shape[-1] // block * size)
        return StoredTensor(name, kind, elements, np.ndarray(shape, dtype or "u1", self._data, start))

    def _check(self, end: int) -> None:
        if end > len(self._data):
            raise ValueError(f"a part ends at byte {end} of {len(self._data)}")


def dequantised(tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, np.ndarray[Any, Any]]]:
    """Yield each tensor with its entries in float32, in one block of memory for all, as ``gguf.dequantize`` does."""
    gguf: Any = require("gguf", why="reading GGUF files")
    tensors = list(tensors)
    sizes = [math.ceil(4 * tensor.n_elements / _ALIGNED) * _ALIGNED for tensor in tensors]
    memory, start = _memory(sum(sizes)), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        entries = np.ndarray(tensor.n_elements, "f4", memory, start)
        start += size
        stored = tensor.data.reshape(-1)
        block, length = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        step = _TOGETHER // block * (length if stored.dtype == np.uint8 else block)
        for index, first in enumerate(range(0, len(stored), step)):
            values = gguf.dequantize(stored[first : first + step], tensor.tensor_type)
            entries[index * _TOGETHER :][: len(values)] = values
        shape = tensor.data.shape
        yield tensor, entries.reshape(*shape[:-1], -1) if tensor.n_elements else entries.reshape(shape)


def _memory(size: int) -> mmap.mmap:
    """Return zeroed memory in large pages where the system has them: the first access takes a third of the time."""
    memory = mmap.mmap(-1, max(1, size), access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
