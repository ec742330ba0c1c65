"""Provenance of a run: versions, hashes, device and times."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from wherewhat.hashes import JSON
from wherewhat.imports import package_version

_PACKAGES = ("wherewhat", "torch", "transformers", "safetensors", "numpy", "pyarrow", "gguf")


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python, the platform and the packages that numbers can depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: package_version(name) for name in _PACKAGES},
    }


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the caller knows about a run; the run directory adds times and the schema version.

    Attributes:
        model_hash: Hash of the model's weights.
        tokenizer_hash: Hash of the tokenizer; None when no text was tokenised.
        text_hash: Hash of the text; None when no text was read.
        dtype: Type of the model's weights, such as `float32`.
        device: Device of the model, such as `cpu` or `cuda:0`.
        seed: Seed of the run.
        versions: Versions of Python, the platform and packages.
        extra: Further facts, such as the name of the GPU.
    """

    model_hash: str | None
    tokenizer_hash: str | None
    text_hash: str | None
    dtype: str
    device: str
    seed: int
    versions: Mapping[str, str | None] = field(default_factory=collect_versions)
    extra: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """When a part was computed and how long it took.

    Attributes:
        key: Name of the part.
        started: Start in UTC, ISO 8601.
        finished: End in UTC, ISO 8601.
        seconds: Wall time.
        wherewhat: Version that computed it; a resumed run can mix versions.
    """

    key: str
    started: str
    finished: str
    seconds: float
    wherewhat: str | None


def provenance_json(provenance: Provenance, times: Sequence[PartTimes], *, config_hash: str) -> dict[str, JSON]:
    """Return the content of `provenance.json`.

    Times are those of the parts, so that an interrupted run states the time that was spent on computing.
    """
    parts = {part.key: asdict(part) for part in times}
    for part in parts.values():
        del part["key"]
    return {
        "config_hash": config_hash,
        **asdict(provenance),
        # All times are UTC in one format, so that their order as text is their order in time.
        "created": min(part.started for part in times),
        "finished": max(part.finished for part in times),
        "seconds": sum(part.seconds for part in times),
        "parts": parts,
    }
