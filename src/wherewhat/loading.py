"""``wherewhat.load``: a model that has proved that it can be captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import WRAPPER_ASSIGNMENTS, wraps
from typing import ParamSpec

from wherewhat.capturing import prove
from wherewhat.models import LoadedModel
from wherewhat.models import load as load_unproved

_Options = ParamSpec("_Options")


def _then_proved(load: Callable[_Options, LoadedModel]) -> Callable[_Options, LoadedModel]:
    """``load`` with the same options, and a proof at the end."""

    @wraps(load, assigned=[name for name in WRAPPER_ASSIGNMENTS if name not in ("__doc__", "__module__")])
    def proved(*args: _Options.args, **options: _Options.kwargs) -> LoadedModel:
        """Load a causal language model and prove its capture.

        Options are those of :func:`wherewhat.models.load`: ``smollm2`` (embedded), a Hugging Face id, a folder or a
        ``.gguf`` file, and how to load it.

        Raises:
            ConfigError: If an option has an unknown value.
            LoadError: If the model cannot be found, read or used.
            CaptureError: If its attention cannot be captured faithfully, with the numbers.
        """
        loaded = load(*args, **options)
        prove(loaded.model)
        return loaded

    return proved


load = _then_proved(load_unproved)
