"""Curves, and the safetensors file that stores them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherewhat.errors import StoreError
from wherewhat.files import explain, open_regular, write_file
from wherewhat.hashes import canonical_json
from wherewhat.runs.schema import SCHEMA_VERSION, VERSION_KEY, is_current

if TYPE_CHECKING:
    from torch import Tensor


# One metadata entry for everything: safetensors writes several in no fixed order, and bytes must be reproducible.
_METADATA_KEY = "wherewhat"
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class Profile:
    """A curve, or several curves, of one layer.

    Attributes:
        values: Tensor with one dimension per axis. NaN marks an empty bin.
        axes: What each dimension is, such as `("head", "distance")`.
    """

    values: Tensor
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != len(self.axes):
            raise ValueError(f"{len(self.axes)} axes {self.axes} for shape {tuple(self.values.shape)}")


def profile_name(document: str | None, layer: int | None, curve: str) -> str:
    """Return the name of a curve: `<document>/<layer>/<curve>`, with `-` for no document and for no layer."""
    if not curve or "/" in curve:
        raise StoreError(f"the curve name {curve!r} is empty or holds a slash: choose another")
    return f"{'-' if document is None else document}/{'-' if layer is None else layer}/{curve}"


def write_profiles(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Write curves atomically; the bytes depend on names, axes and values alone."""
    from safetensors.torch import save

    tensors = {}
    for name in sorted(profiles):
        _check_name(name)
        tensor = profiles[name].values.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise StoreError(f"the curve {name!r} has type {dtype}: use one of {', '.join(_DTYPES)}")
        # A copy where two curves may share memory, which safetensors refuses.
        tensors[name] = tensor.clone() if tensor is profiles[name].values else tensor
    axes = {name: list(profiles[name].axes) for name in tensors}
    metadata = {_METADATA_KEY: canonical_json({"axes": axes, VERSION_KEY: SCHEMA_VERSION})}
    write_file(path, save(tensors, metadata))


def join_profiles(path: Path, sources: Sequence[Path]) -> None:
    """Join curve files into one, atomically."""
    joined: dict[str, Profile] = {}
    for source in sources:
        file = ProfileFile(source)
        for name in file:
            if name in joined:
                raise StoreError(f"two parts hold the curve {name!r}: give every curve its own name")
            joined[name] = Profile(file[name], file.axes(name))
    write_profiles(path, joined)


def _check_name(name: str) -> None:
    document, layer, curve = ["", "", "", *name.rsplit("/", 2)][-3:]
    if not (document and curve and (layer == "-" or layer.isdecimal())):
        raise StoreError(f"the curve name {name!r} is not <document>/<layer>/<curve>: use profile_name()")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise StoreError(f"the curve name {name!r} is not valid Unicode: rename the document")


class ProfileFile(Mapping[str, "Tensor"]):
    """The curves of a run by name, each read from the file on access."""

    def __init__(self, path: Path) -> None:
        """Open a file that `write_profiles` or `join_profiles` wrote."""
        self.path = path
        with self._open() as file:
            try:
                details = json.loads((file.metadata() or {})[_METADATA_KEY])
                self._axes = {name: tuple(details["axes"][name]) for name in sorted(file.keys())}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreError(f"cannot read {path}: it is not a file of wherewhat profiles") from error
        is_current(details.get(VERSION_KEY), path)  # curves are the same in older versions

    def __getitem__(self, name: str) -> Tensor:
        """The curve `name`; its dimensions are `axes(name)`."""
        if name not in self._axes:
            raise KeyError(name)
        with self._open() as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def axes(self, name: str) -> tuple[str, ...]:
        """What each dimension of the curve `name` is."""
        return self._axes[name]

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            open_regular(self.path).close()  # safetensors would wait for the writer of a pipe
            return safe_open(self.path, framework="pt")
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {explain(error)}") from error
        except SafetensorError as error:
            raise StoreError(f"cannot read {self.path}: it is not a file of wherewhat profiles") from error
