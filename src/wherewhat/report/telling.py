"""The heads that a page begins with: the most positional, the most symbolic and the most mixed one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wherewhat.report.excerpt import Excerpt

Head = tuple[int, int]
"""Index of the layer among the shown ones, and number of the head."""

_UNSUITABLE = ("sink", "uniform")
"""Labels of heads that are never chosen: scores after the sink describe little of a sink's attention, and those of
uniform attention are both 1."""


_NONE = {
    "positional": "is more positional than symbolic",
    "symbolic": "is more symbolic than positional",
    "mixed": "is mixed",
}

_LINE = 24
"""Tokens of the coloured line: about as many as three lines of a card hold."""


def telling_heads(
    swaps: Mapping[str, Any] | None, excerpt: Excerpt, layers: Sequence[int]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Choose up to three heads by their scores without the sink, and say which kinds have none and why.

    Of the heads that are neither sinks nor uniform, the most positional has the largest difference of positional and
    symbolic score, if it is above 0, and the most symbolic the least, if it is below 0. The most mixed, of those
    labelled mixed and not chosen yet, has both scores nearest to 0.5. Of equal heads the one in the earliest layer is
    chosen, then the one with the smallest number.

    Args:
        swaps: Scores and labels of every head, from :func:`wherewhat.report.run_sections.swaps`; None if they were not
            measured, which gives neither heads nor sentences.
        excerpt: The excerpt that the page shows.
        layers: The layers that the page shows.

    Returns:
        Kind, layer (an index into ``layers``), head and :func:`telling_line` of each, and a sentence for each kind that
        has none.
    """
    if swaps is None:
        return [], []
    scores = {
        (at, head): (pos, swaps["s_sym"][at][head])
        for at, of_layer in enumerate(swaps["s_pos"])
        for head, pos in enumerate(of_layer or ())
        if pos is not None and swaps["s_sym"][at][head] is not None
    }
    labels = {(at, head): _label(swaps, at, head) for at, head in scores}
    suitable = {place: pair for place, pair in scores.items() if labels[place] not in _UNSUITABLE}
    if not suitable:
        return [], ["Every head with scores is an attention sink or attends uniformly: none is shown here."]

    ranks = {
        "positional": {place: sym - pos for place, (pos, sym) in suitable.items() if pos > sym},
        "symbolic": {place: pos - sym for place, (pos, sym) in suitable.items() if sym > pos},
        "mixed": {
            place: math.hypot(pos - 0.5, sym - 0.5)
            for place, (pos, sym) in suitable.items()
            if labels[place] == "mixed"
        },
    }
    chosen: dict[str, Head] = {}
    missing = []
    for kind, of_kind in ranks.items():
        free = of_kind.keys() - chosen.values()
        if free:
            chosen[kind] = min(free, key=lambda place: (of_kind[place], place))
        else:
            missing.append(f"No {'other ' if chosen else ''}head that is neither a sink nor uniform {_NONE[kind]}.")
    heads = []
    for kind, (at, head) in chosen.items():
        sinks = excerpt.sinks.get(layers[at])
        line = telling_line(excerpt.logits[layers[at]][head], None if sinks is None else sinks[head])
        heads.append({"kind": kind, "layer": at, "head": head, "line": line})
    return heads, missing


def _label(swaps: Mapping[str, Any], at: int, head: int) -> str:
    code = swaps["label"][at] and swaps["label"][at][head]
    return "" if code is None else str(swaps["codes"][int(code)])


def attention_weights(logits: Tensor, sink: float | None = None) -> tuple[Tensor, Tensor]:
    """Return attention weights ``(rows, rows)``, and which keys each query sees, of logits as in a passage."""
    rows = int((2 * logits.numel()) ** 0.5)
    i, j = torch.tril_indices(rows, rows).unbind()
    square = torch.full((rows, rows + 1), -torch.inf, dtype=torch.float64)
    square[i, j] = logits.double().nan_to_num(-torch.inf)
    square[:, rows] = -torch.inf if sink is None else sink
    seen = square[:, :rows].isfinite()
    return square.softmax(-1)[:, :rows].where(seen, 0.0), seen


def telling_line(logits: Tensor, sink: float | None = None) -> dict[str, int] | None:
    """Return the query and the earlier key whose attention exceeds most the mean over all queries that see the key.

    The query is in the second half of the excerpt. The key is not the first token, and less than :data:`_LINE` tokens
    before the query.

    Args:
        logits: Lower triangle ``(pairs,)`` of one head, row after row; NaN where a query does not see a key.
        sink: Logit of the head's sink, where it has one.

    Returns:
        Their indices, the first of equals, and that of the first token to show; None if there is no such pair.
    """
    shares, seen = attention_weights(logits, sink)
    rows = len(shares)
    excess = shares - shares.sum(0) / seen.sum(0).clamp(min=1)
    i, j = torch.arange(rows)[:, None], torch.arange(rows)
    allowed = seen & (i >= rows // 2) & (j > 0) & (j < i) & (i - j < _LINE)
    query, key = divmod(int(excess.masked_fill(~allowed, -torch.inf).argmax()), rows)
    return {"start": max(0, query + 1 - _LINE), "query": query, "key": key} if allowed[query, key] else None
