"""How long a measurement will take and how much memory, said before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wherewhat.errors import WherewhatError
from wherewhat.measure.base import Measurement, Subject

_SHORT, _LONG = 64, 256
_WORTH_SAYING = 2.0


def estimate(subject: Subject, measurement: Measurement, config: Any, texts: Sequence[Tensor]) -> str:
    """One line, or nothing if it is quick.

    Two short pieces of the first text are measured (of the first few, where documents are measured together); the time
    is taken to grow as n and n².

    Args:
        subject: The model.
        measurement: What will be measured.
        config: Its options.
        texts: Token ids of each document, ``(n,)``.
    """
    if max(len(ids) for ids in texts) <= _LONG:
        return ""
    first = texts[0]
    try:
        _seconds(subject, measurement, config, texts, _SHORT)  # warms up allocators and kernels
        short, long = (_seconds(subject, measurement, config, texts, n) for n in (_SHORT, _LONG))
    except WherewhatError:  # options made for long texts need not suit short pieces
        return ""
    square = max(0.0, (long / _LONG - short / _SHORT) / (_LONG - _SHORT))
    linear = max(0.0, long / _LONG - square * _LONG)
    total = sum(linear * len(ids) + square * len(ids) ** 2 for ids in texts)
    if total < _WORTH_SAYING:
        return ""
    return f"{len(texts)} documents of {len(first)} tokens: about {duration(total)}"


def memory(model: Any, tokens: int, *, together: bool = False, chunk: int | None = None) -> float:
    """Bytes a forward pass needs, roughly: the weights and the activations of one block.

    Nothing n × n is held, and no more than one layer's queries and keys unless the text is run in chunks, so this grows
    with the length of the text.

    Args:
        model: The model.
        tokens: Tokens of a text.
        together: Whether documents are measured together, with float64 sums of every layer's queries and keys.
        chunk: Tokens of a chunk, if texts are run in chunks: queries, keys, values and outputs of all layers are held.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    size = next(model.parameters()).element_size()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sums = config.num_hidden_layers * tokens * 4 * hidden * 8 if together else 0
    at_once = min(tokens, chunk or tokens)
    held = 0 if at_once == tokens else config.num_hidden_layers * tokens * 4 * hidden * size
    return float(weights + at_once * (6 * hidden + 3 * inner) * size + sums + held)


def duration(seconds: float) -> str:
    """A time span in words: ``40 s``, ``3 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _seconds(subject: Subject, measurement: Measurement, config: Any, texts: Sequence[Tensor], n: int) -> float:
    """Time that the first ``n`` tokens of one text take."""
    seconds = 0.0
    if measurement.measure is not None:
        started = time.perf_counter()
        measurement.measure(subject, texts[0][None, :n], config)
        seconds += time.perf_counter() - started
    if measurement.across is not None:
        pieces = [ids[:n] for ids in texts[: measurement.least_documents]]
        started = time.perf_counter()
        measurement.across(subject, pieces, config)
        seconds += (time.perf_counter() - started) / len(pieces)
    return seconds
