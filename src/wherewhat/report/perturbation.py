"""What disturbing words and positions costs, by rate."""

from __future__ import annotations

from typing import Any

from wherewhat.measure.perturb.names import KINDS, percent
from wherewhat.report.measuring import Runs
from wherewhat.report.over_documents import curves_by_document, documents, mean_of, scores_by_document


def perturbation(runs: Runs) -> dict[str, Any] | None:
    """Rise of the loss by kind and rate, on all targets and on untouched ones; None if it was not measured."""
    found = runs.request("perturb")
    if found is None:
        return None
    request, directory = found
    scores = scores_by_document(directory)
    kinds = []
    for kind in request.options["kinds"]:
        curves = curves_by_document(directory, f"loss_by_rate_{kind}")
        if not curves:
            continue
        rates = curves[0][:, 0].tolist()
        # The shares were stored in single precision; their names tell what they are exactly.
        names = [percent(round(rate, 6)) for rate in rates]
        kinds.append(
            {
                "id": kind,
                "title": KINDS[kind],
                "rates": [float(name) for name in names],
                "all": [mean_of(scores, f"rise_{kind}_at_{name}") for name in names],
                "untouched": [mean_of(scores, f"rise_{kind}_at_{name}_untouched") for name in names],
            }
        )
    return {
        "documents": len(documents(directory)),
        "tokens": request.tokens,
        "loss": mean_of(scores, "loss"),
        "kinds": kinds,
    }
