"""``wherewhat.load``: a model that has proved that it can be captured."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from wherewhat.capturing import prove
from wherewhat.models import LoadedModel, Weights
from wherewhat.models import load as load_unproved


def load(
    spec: str | os.PathLike[str] = "smollm2",
    *,
    weights: Weights = "trained",
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    device_map: Any = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and prove its capture.

    Args:
        spec: ``smollm2`` (embedded), a Hugging Face id, a folder, or a ``.gguf`` file.
        weights: ``trained``, or its twins ``random`` and ``shuffled``.
        seed: Seed of the twins.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device_map: Passed to accelerate, for models larger than one device.
        offline: Never open a connection.
        trust_remote_code: Let a model's own Python code run.
        revision: Branch, tag or commit of a Hugging Face id.
        attn_implementation: Passed to transformers.
        cache_dir: Where converted GGUF files are kept.
        progress: Called with one line before a step that can take long.

    Raises:
        ConfigError: If an option has an unknown value.
        LoadError: If the model cannot be found, read or used.
        CaptureError: If its attention cannot be captured faithfully, with the numbers.
    """
    loaded = load_unproved(
        spec,
        weights=weights,
        seed=seed,
        device=device,
        dtype=dtype,
        device_map=device_map,
        offline=offline,
        trust_remote_code=trust_remote_code,
        revision=revision,
        attn_implementation=attn_implementation,
        cache_dir=cache_dir,
        progress=progress,
    )
    prove(loaded.model)
    return loaded
