"""What made a run: versions, hashes, machine and times."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from wherewhat.hashes import JSON

_PACKAGES = ("wherewhat", "torch", "transformers", "safetensors", "numpy", "pyarrow", "gguf")


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it; None when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def collect_versions() -> dict[str, str | None]:
    """Versions of Python, the platform and the packages that numbers can depend on."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: package_version(name) for name in _PACKAGES},
    }


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the caller knows about a run; the store adds times and the schema version.

    Attributes:
        model_hash: Hash of the model's weights.
        tokenizer_hash: Hash of the tokenizer; None when no text was tokenised.
        text_hash: Hash of the text; None when no text was read.
        dtype: Type the model ran in, such as `float32`.
        device: Device the model ran on, such as `cpu` or `cuda:0`.
        seed: Seed of the run.
        versions: Versions of what ran.
        extra: Anything else worth keeping, such as the name of the GPU.
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
    """The content of `provenance.json`.

    Times come from the parts, so that a run that was interrupted tells the time that computing really took.
    """
    return {
        "config_hash": config_hash,
        "model_hash": provenance.model_hash,
        "tokenizer_hash": provenance.tokenizer_hash,
        "text_hash": provenance.text_hash,
        "dtype": provenance.dtype,
        "device": provenance.device,
        "seed": provenance.seed,
        "versions": dict(provenance.versions),
        "extra": dict(provenance.extra),
        # All times are UTC in one format, so that their order as text is their order in time.
        "created": min(part.started for part in times),
        "finished": max(part.finished for part in times),
        "seconds": sum(part.seconds for part in times),
        "parts": {
            part.key: {
                "started": part.started,
                "finished": part.finished,
                "seconds": part.seconds,
                "wherewhat": part.wherewhat,
            }
            for part in times
        },
    }
