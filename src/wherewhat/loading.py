"""``wherewhat.load``: a model that has proved that it can be captured."""

from __future__ import annotations

from typing import Any

from wherewhat.capturing import prove
from wherewhat.models import LoadedModel
from wherewhat.models import load as load_unproved


def load(spec: Any = "smollm2", **options: Any) -> LoadedModel:
    """Load a causal language model and prove its capture.

    Args:
        spec: ``smollm2`` (embedded), a Hugging Face id, a folder, or a ``.gguf`` file.
        options: As for :func:`wherewhat.models.load`.

    Raises:
        LoadError: If the model cannot be found, read or used.
        CaptureError: If its attention cannot be captured faithfully, with the numbers.
    """
    loaded = load_unproved(spec, **options)
    prove(loaded.model)
    return loaded
