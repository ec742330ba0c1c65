"""Known answers: a caption compares only where the numbers beside it do."""

from __future__ import annotations

from types import SimpleNamespace

from wherewhat.rules.captions import CAPTIONS
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import Request


def caption(chart, measurement, **run):
    """The caption of a chart from a run of which only some numbers are known."""
    names = [f"document {number}" for number in range(run.pop("documents"))]
    known = SimpleNamespace(documents=names, range_of=lambda metric: (-1.0, 1.0), **run)
    runs = Runs([(Request("axes"), SimpleNamespace()), (Request(measurement), known)])
    return CAPTIONS[chart].held(runs)[0].text


def test_order_of_keys_at_dummy_distances():
    for model, control, words in (
        ([0.90, 0.91, 0.92], [0.70, 0.71, 0.70], "is kept better than with random phases: rank correlation 0.910 ± "),
        ([0.70, 0.71, 0.72], [0.97, 0.98, 0.97], "is kept less well than with random phases: rank correlation 0.71"),
        (
            [0.70, 0.99, 0.70],
            [0.71, 0.70, 0.99],
            "How well the order of keys is kept: rank correlation 0.80 (0.38 to",
        ),
        ([0.78], [0.97], "rank correlation 0.780, with random phases 0.970 (one document, too few for a comparison)."),
    ):
        means = {"key_rank_correlation": model, "key_rank_correlation_scrambled": control}
        found = caption(
            "distance",
            "distance",
            documents=len(model),
            document_means=lambda metric, means=means: dict(enumerate(means[metric])),
        )
        assert words in found, found


def test_bands_that_cost_more_than_random_planes():
    losses = {"loss": 3.0, "loss_without_random": 3.1, "loss_without_band_1": 5.0, "loss_without_band_2": 3.1}

    noise = dict.fromkeys(losses, (0.0, 0.01, 0.02)) | {
        "loss": (0.0, 0.0, 0.0),
        "loss_without_random": (0.0, 0.02, 0.01),
    }

    def bands(documents):
        def document_means(metric):
            return {number: losses[metric] + x for number, x in enumerate(noise[metric][:documents])}

        options = {"bands": 2}
        return caption("bands", "frequencies", documents=documents, options=options, document_means=document_means)

    cost = "2.010 ± 0.025 nats, against 0.110 ± 0.025 for as many random planes"
    assert bands(3) == f"Masking band 1 costs most: {cost} (3 documents)."
    losses["loss_without_band_1"] = 3.1
    assert bands(3).startswith("No band costs")
    assert bands(2) == "Two documents are too few to say which differences are more than chance."
