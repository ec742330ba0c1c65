"""What a run is of: its model, size, checkpoint, weights and encoding, read from its configuration and provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

FACTS: dict[str, str] = {
    "run": "str",
    "measurement": "str",
    "model": "str",
    "size": "int",
    "checkpoint": "str",
    "step": "int",
    "weights": "str",
    "encoding": "str",
    "seed": "int",
    "dtype": "str",
    "tokens": "int",
    "text": "str",
}
"""What runs can be grouped by, and the type of each."""

_CHECKPOINT = re.compile(
    r"^(?:(?:global[-_]?)?step|checkpoint|ckpt|iter(?:ation)?)[-_=]?(\d+)([km]?)(?:[-_.].*)?$", re.I
)
_SIZE = re.compile(r"(?:^|[-_.x])(\d+(?:\.\d+)?)([kmbt])(?=$|[-_.])", re.I)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def run_facts(name: str, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of one run.

    Args:
        name: Name of its folder.
        config: Its configuration.
        provenance: What made it.
    """
    extra = provenance.get("extra")
    extra = extra if isinstance(extra, Mapping) else {}
    model, checkpoint = _model(config, extra)
    parameters = extra.get("parameters")
    text = provenance.get("text_hash")
    return {
        "run": name,
        "measurement": _text(config.get("measurement")),
        "model": model,
        "size": parameters if isinstance(parameters, int) else stated_size(model or ""),
        "checkpoint": checkpoint,
        "step": None if checkpoint is None else training_step(checkpoint),
        "weights": _text(config.get("weights")),
        "encoding": _text(extra.get("encoding") or config.get("encoding")),
        "seed": _integer(config.get("seed")),
        "dtype": _text(config.get("dtype")),
        "tokens": _integer(config.get("tokens")),
        "text": text[:12] if isinstance(text, str) else None,
    }


def training_step(checkpoint: str) -> int | None:
    """The step in the name of a checkpoint: 1000 in ``step1000``, ``checkpoint-1000`` or ``global_step1k``."""
    found = _CHECKPOINT.match(PurePosixPath(checkpoint).name)
    return None if found is None else int(found[1]) * _FACTORS[found[2].lower()]


def stated_size(model: str) -> int | None:
    """Parameters that a model's name states: 160,000,000 in ``pythia-160m``."""
    found = _SIZE.search(model)
    return None if found is None else round(float(found[1]) * _FACTORS[found[2].lower()])


def _model(config: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Model and checkpoint. A folder that is called after a step belongs to the model of the folder around it."""
    name = _text(config.get("model"))
    asked = _text(extra.get("checkpoint"))
    if asked is not None:
        return name, asked
    if name is not None and training_step(name) is not None:
        parent = PurePosixPath(str(extra.get("spec") or "").replace("\\", "/")).parent.name
        return parent or name, name
    return name, _text(extra.get("revision"))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
