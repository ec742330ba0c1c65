"""Sinks and the two versions of swap scores: labels of heads, and which version predicts retrieval.

    wherewhat heads MODEL --documents 4 --tokens 256 --set queries=8
    python studies/sinks.py runs/heads-SmolLM2… runs/heads-gemma…
    python studies/sinks.py --keys smollm2                      # attention on single keys
    python studies/sinks.py --costs smollm2 runs/heads-SmolLM2…  # and what limiting single heads costs

Each argument is a run of ``wherewhat heads``. Versions are scored over all keys, as in the papers, and over the keys
after the sink. The area under the ROC curve is that of claim 24: how often one of the tenth of heads with most
retrieval or induction attention is more symbolic (``s_sym - s_pos``) than another head. ``--costs`` also measures what
limiting each head to a window costs, and its rank correlation with the symbolic scores. ``--keys`` counts how often the
first key is the most attended one, and heads in which another key draws attention whatever the query.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import wherewhat
from wherewhat.captures.proof import prove
from wherewhat.measures.statistics import in_words, interval
from wherewhat.measures.swaps import LABELS, SCORE_LABELS, SINK
from wherewhat.measures.swaps.scores import label, sink_heads
from wherewhat.measures.tensors import centred_ranks, correlation
from wherewhat.plans.costs import HeadStatistics, measure_head_costs
from wherewhat.rules.claims.heads import TOP, VERSIONS, ranked_higher
from wherewhat.rules.numbers import head_labels
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.results import StoredRun

Places = list[tuple[int, int]]

WINDOW, SINKS = 64, 4
"""Last and first keys that a limited head sees."""

FROM = 16
"""First query whose most attended key is counted."""


def write(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")


def values(run: StoredRun, metric: str, places: Places) -> Tensor:
    """Return the mean over documents of a metric of heads."""
    found = run.head_values(metric)
    return torch.tensor([fmean(found[place]) for place in places], dtype=torch.float64)


def counted(codes: Tensor) -> str:
    """Return the number of heads with each label."""
    found = Counter(codes.tolist())
    return " / ".join(str(found[LABELS.index(name)]) for name in ("sink", *(SCORE_LABELS[i] for i in (1, 2, 3, 0))))


def describe(run: StoredRun) -> Places:
    """Print labels in both versions, with and without a class of sinks, and areas under the curves; return heads."""
    labels = head_labels(run)
    places = sorted(labels)
    sink = torch.tensor([labels[place] == LABELS.index("sink") for place in places])
    write(f"{run.title}: {len(places)} heads, {len(run.documents)} documents")
    write("  sink / positional / symbolic / uniform / mixed")
    for version, ending in reversed(VERSIONS.items()):
        both = [values(run, f"{name}{ending}_together", places) for name in ("s_pos", "s_sym")]
        for what, given in (("all heads", None), ("sinks apart", sink)):
            write(f"  {version}, {what}: {counted(label(*both, float(run.options['gamma']), sink=given))}")
    for metric in ("retrieval", "induction"):
        no_sink, all_keys = (ranked_higher(run, metric, ending) for ending in VERSIONS.values())
        gains = [one - other for one, other in zip(no_sink, all_keys, strict=True)]
        top = values(run, metric, places).argsort(descending=True)[: round(TOP * len(places))]
        areas = (in_words(interval(x)) for x in (all_keys, no_sink, gains))
        write(
            "  {}: area over all keys {}, without the sink {}, gain {}; ".format(metric, *areas)
            + f"{int(sink[top].sum())} of the {len(top)} highest are sinks"
        )
    by_documents(run, places)
    return places


def by_documents(run: StoredRun, places: Places) -> None:
    """Print the number of sinks by their mean alone and with the interval, on the first 2, 3, … documents."""
    mass, even = run.head_documents("sink_mass"), run.document_means("sink_mass_uniform")
    excess = torch.tensor([[mass[place][name] - even[name] for name in run.documents] for place in places])
    for count in range(2, len(run.documents) + 1):
        some = excess[:, :count]
        found = int((some.mean(1) >= SINK).sum()), int(sink_heads(some).sum())
        write("  on {} documents {} heads exceed the threshold, {} with the interval".format(count, *found))


def describe_keys(name: str, documents: int, tokens: int) -> None:
    """Print the share of queries that attend most to the first key, by excess, and heads with another sink."""
    first, excess, other = [], [], []
    for document in wherewhat.embedded_documents(documents):
        layers = wherewhat.attention(name, document, tokens=tokens)
        weights = torch.cat([layer.pattern()[0].double() for layer in layers])  # (heads, n, n)
        even = 1 / torch.arange(1, tokens + 1, dtype=torch.float64)
        excess.append((weights[:, 1:, 0] - even[1:]).mean(1))
        first.append((weights.tril(-1)[:, FROM:].argmax(-1) == 0).double().mean(1))
        other.append(weights[:, tokens // 2 :, 1 : tokens // 2].mean(1).amax(-1))  # late queries, early keys
    means, shares = torch.stack(excess).mean(0), torch.stack(first).mean(0)
    for low in range(10):
        some = shares[(means >= low / 10) & (means < (low + 1) / 10)]
        if len(some):
            write(
                f"  excess from {low / 10}: {len(some)} heads, first key most attended by {some.mean():.2f} of queries"
            )
    for least in (0.1, 0.3):
        listed = ", ".join(str(int((x > least).sum())) for x in other)
        write(f"  heads in which another key has more than {least}, by document: {listed}")


def costs(name: str, documents: int, tokens: int) -> dict[str, dict[tuple[int, int], float]]:
    """Return rise of the loss and lost retrieval when single heads of layers without a window are limited."""
    loaded = wherewhat.load(name)
    texts = [loaded.tokenizer(document.text)["input_ids"] for document in wherewhat.embedded_documents(documents)]
    ids = torch.tensor([text[:tokens] for text in texts])
    unused: dict[int, HeadStatistics] = defaultdict(lambda: None)  # type: ignore[arg-type,return-value]
    found = measure_head_costs(
        loaded.model, prove(loaded.model), ids, unused, window=WINDOW, sinks=SINKS, operations=("window",)
    )
    return {
        what: {
            (layer, head): cost
            for layer, by_document in by_operation["window"].items()
            for head, cost in enumerate(by_document.mean(0).tolist())
        }
        for what, by_operation in (("rise of the loss", found.rise), ("lost retrieval", found.lost))
    }


def main() -> None:
    """Print the labels of the runs, and costs where a model is named."""
    parser = argparse.ArgumentParser(description="Sinks and the two versions of swap scores.")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--keys", metavar="MODEL", help="measure the attention on single keys of a model")
    parser.add_argument("--costs", metavar="MODEL", help="measure the costs of single heads of the first run's model")
    parser.add_argument("--documents", type=int, default=4, help="documents of a model")
    parser.add_argument("--tokens", type=int, default=256, help="their tokens")
    options = parser.parse_args()
    runs = [StoredRun(RunDirectory.load(path)) for path in options.runs]
    found = [describe(run) for run in runs]
    if options.keys is not None:
        describe_keys(options.keys, options.documents, options.tokens)
    if options.costs is None:
        return
    for what, cost in costs(options.costs, options.documents, options.tokens).items():
        places = [place for place in found[0] if place in cost]
        measured = centred_ranks(torch.tensor([cost[place] for place in places]))
        for version, ending in VERSIONS.items():
            symbolic = values(runs[0], f"s_sym{ending}", places) - values(runs[0], f"s_pos{ending}", places)
            ranks = correlation(centred_ranks(symbolic), measured)
            write(f"  rank correlation of {what} with symbolic scores {version}: {ranks:.2f}, {len(places)} heads")


if __name__ == "__main__":
    main()
