"""Loading: a model name, folder or file in; a ready, checked model and its tokenizer out.

Nothing heavy is imported until a name is used, so that `wherewhat --help` stays fast.
"""

from typing import TYPE_CHECKING

from wherewhat.lazily import lazy_names

if TYPE_CHECKING:
    from wherewhat.models.loaded import LoadedModel, Weights
    from wherewhat.models.loading import load
    from wherewhat.models.twins import random_twin, shuffle_query_key
    from wherewhat.positions import max_positions

_HOMES = {
    "LoadedModel": "wherewhat.models.loaded",
    "Weights": "wherewhat.models.loaded",
    "load": "wherewhat.models.loading",
    "max_positions": "wherewhat.positions",
    "random_twin": "wherewhat.models.twins",
    "shuffle_query_key": "wherewhat.models.twins",
}

__all__ = ["LoadedModel", "Weights", "load", "max_positions", "random_twin", "shuffle_query_key"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
