"""Loading: a model name, folder or file in; a ready, checked model and its tokenizer out.

Nothing heavy is imported until a name is used, so that `wherewhat --help` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wherewhat.models.limits import max_positions
    from wherewhat.models.loaded import LoadedModel, Weights
    from wherewhat.models.loading import load
    from wherewhat.models.twins import random_twin, shuffle_query_key

_HOMES = {
    "LoadedModel": "wherewhat.models.loaded",
    "Weights": "wherewhat.models.loaded",
    "load": "wherewhat.models.loading",
    "max_positions": "wherewhat.models.limits",
    "random_twin": "wherewhat.models.twins",
    "shuffle_query_key": "wherewhat.models.twins",
}

__all__ = ["LoadedModel", "Weights", "load", "max_positions", "random_twin", "shuffle_query_key"]


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
