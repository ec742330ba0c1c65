"""GGUF files: settings and tensors located in their bytes, and tensors de-quantised to float32."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wherewhat.imports import require

# Numbers of types in GGUF files, and NumPy's types of those of fixed size.
_STRING, _LIST = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRINGS = [_LIST, _STRING]
"""Types of a setting that is a list of strings."""

_PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_VERSIONS = (2, 3)
_MOST_DIMENSIONS = 8
_ALIGNMENT = "general.alignment"
# Entries that are de-quantised together: their intermediate arrays stay in the cache of a core.
_TOGETHER = 1 << 17
# Tensors start at multiples of so many entries (64 bytes), as in torch.
_ALIGNED = 16


@dataclass(frozen=True)
class Setting:
    """A setting, with the attributes of ``gguf.ReaderField`` that transformers reads.

    Attributes:
        types: Number of its type; for a list also that of its entries.
        stored: Bytes of each string, or an array of numbers.
    """

    types: list[int]
    stored: list[bytes] | np.ndarray[Any, Any]

    @cached_property
    def parts(self) -> list[Any]:
        """Entries as strings or numbers."""
        return [text.decode() for text in self.stored] if isinstance(self.stored, list) else self.stored.tolist()

    @property
    def data(self) -> range:
        """Indices of the entries in ``parts``."""
        return range(len(self.stored))

    def value(self) -> Any:
        """Return the value, or the list of values."""
        return self.parts if self.types[0] == _LIST else self.parts[0]


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

    def __init__(self, path: str | Path) -> None:
        self._gguf: Any = require("gguf", why="reading GGUF files")
        with Path(path).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4  # behind the letters GGUF
        version, tensors, settings = self._numbers("IQQ")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise NotImplementedError("big-endian numbers are not supported")
            raise ValueError(f"version {version} of GGUF is not 2 or 3")
        if max(tensors, settings) > len(self._data):
            raise ValueError(f"{tensors} tensors and {settings} settings in {len(self._data)} bytes")
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
        # Otherwise a small file could need any amount of memory.
        if sum(tensor.data.nbytes for tensor in self.tensors) > len(self._data):
            raise ValueError("tensors that overlap")

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
        self._check(at, "a setting")
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
        self._check(self._at, "a setting")
        return Setting(types, np.ndarray(length, dtype, self._data, start))

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
        self._check(start + elements // block * size, repr(name))
        dtype = _PLAIN.get(kind.name)
        if dtype is None:
            shape = (*shape[:-1], shape[-1] // block * size)
        return StoredTensor(name, kind, elements, np.ndarray(shape, dtype or "u1", self._data, start))

    def _check(self, end: int, part: str) -> None:
        if end > len(self._data):
            raise ValueError(f"{part} ends at byte {end} of {len(self._data)}")


def dequantised(tensors: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, np.ndarray[Any, Any]]]:
    """Yield each tensor with its entries in float32, equal to those of ``gguf.dequantize``, in one block of memory.

    Tensors are unpacked in parallel.
    """
    gguf: Any = require("gguf", why="reading GGUF files")
    tensors = list(tensors)
    # One array for all: NumPy uses large pages for it, and the first access takes a third of the time.
    memory = np.empty(sum(tensor.n_elements + _ALIGNED for tensor in tensors), np.float32)
    places, end = [], 0
    for tensor in tensors:
        start = end + -(memory.ctypes.data // 4 + end) % _ALIGNED
        end = start + tensor.n_elements
        places.append(memory[start:end])

    def unpack(tensor: StoredTensor, entries: np.ndarray[Any, Any]) -> None:
        block, length = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        stored = tensor.data.reshape(-1, length if tensor.data.dtype == np.uint8 else block)
        step = _TOGETHER // block
        for first in range(0, len(stored), step):
            blocks, place = stored[first : first + step], entries[first * block : (first + step) * block]
            if tensor.tensor_type.name in _SIMPLE:
                _unpack(tensor.tensor_type.name, blocks, place.reshape(-1, block))
            else:
                place[:] = gguf.dequantize(blocks.reshape(-1), tensor.tensor_type)

    with ThreadPoolExecutor() as pool:
        for tensor, entries, _ in zip(tensors, places, pool.map(unpack, tensors, places), strict=True):
            rows = tensor.data.shape[:-1]
            yield tensor, entries.reshape(*rows, tensor.n_elements // math.prod(rows))


# Blocks of 32 entries that begin with so many numbers in float16: a scale, and a minimum.
_SIMPLE = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}


def _unpack(kind: str, blocks: np.ndarray[Any, Any], entries: np.ndarray[Any, Any]) -> None:
    """Write the entries of blocks ``(n, bytes)`` of one of the most common types to ``entries`` ``(n, 32)``.

    The operations are those of ``gguf.dequantize``, in place.
    """
    scales, start = blocks.view("<f2"), 2 * _SIMPLE[kind]
    if kind == "Q8_0":
        entries[:] = blocks[:, start:].view(np.int8)
    else:  # the low halves of all bytes, then the high ones
        entries[:, :16] = (blocks & 15)[:, start:]
        entries[:, 16:] = (blocks >> 4)[:, start:]
    if kind == "Q4_0":
        entries -= 8
    entries *= scales[:, :1].astype(np.float32)
    if kind == "Q4_1":
        entries += scales[:, 1:2].astype(np.float32)
