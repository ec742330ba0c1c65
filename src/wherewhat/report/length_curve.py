"""Loss by position under a few length methods."""

from __future__ import annotations

from typing import Any

from wherewhat.extend import find
from wherewhat.report.encoding import rounded
from wherewhat.report.measuring import Runs
from wherewhat.report.over_documents import curves_by_document, documents, mean_of, plain_interval, scores_by_document

_PLAIN = "none"


def lengths(runs: Runs) -> dict[str, Any] | None:
    """Loss by position of each method, and what it costs beside the untouched model; None if it was not measured.

    The cost is taken on each document before the mean, so that differences between texts do not hide it.
    """
    found = runs.request("extend")
    if found is None:
        return None
    request, directory = found
    scores = scores_by_document(directory)
    plain = curves_by_document(directory, f"loss_by_position_{_PLAIN}")
    methods = []
    for name in request.options["methods"]:
        curves = curves_by_document(directory, f"loss_by_position_{name}")
        if not curves or not plain:
            continue
        pairs = list(zip(curves, plain, strict=True))
        buckets = range(len(plain[0]))
        methods.append(
            {
                "name": name,
                "rule": find(name).rule(),
                "loss": [plain_interval([float(c[i, 1]) for c in curves]) for i in buckets],
                "cost": [plain_interval([float(c[i, 1] - p[i, 1]) for c, p in pairs]) for i in buckets],
                "beyond": mean_of(scores, f"loss_beyond_{name}"),
                "beyond_cost": mean_of(scores, f"loss_beyond_{name}", less=f"loss_beyond_{_PLAIN}"),
                "found": mean_of(scores, f"found_beyond_{name}"),
            }
        )
    if not methods:
        return None
    edge = mean_of(scores, "trained_length")
    return {
        "documents": len(documents(directory)),
        "tokens": request.tokens,
        "beyond": request.beyond,
        "edge": None if edge is None else edge["mean"],
        "positions": [rounded(float(x)) for x in plain[0][:, 0]],
        "methods": methods,
    }
