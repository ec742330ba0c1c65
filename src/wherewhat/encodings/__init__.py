"""The same small language model under every encoding: how where and what come apart while it learns, and what for."""

from wherewhat.lazily import lazy_names

_HOMES = {
    "Recipe": "wherewhat.encodings.recipe",
    "read_recipe": "wherewhat.encodings.recipe",
    "EncodingRun": "wherewhat.encodings.runs",
    "open_runs": "wherewhat.encodings.runs",
    "run_study": "wherewhat.encodings.study",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
