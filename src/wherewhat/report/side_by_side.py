"""Several models on one page: differences of their headline numbers, and heads of a fine-tuned model and its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from wherewhat.measures.statistics import Interval, in_words, interval, welch
from wherewhat.measures.swaps import LABELS
from wherewhat.report.data import WANTED, interval_json, rounded, summary_json
from wherewhat.report.excerpt import Excerpt
from wherewhat.rules.numbers import head_labels
from wherewhat.runs.collection import Runs
from wherewhat.runs.results import MetricSummary, StoredRun

SAME_WEIGHTS = 0.5
"""Least correlation of the weights of a model and its fine-tuned version; that of separate trainings is near 0."""

CHANGED = 10
"""Number of heads listed as changed most."""

_SHAPE = ("type", "kv_heads", "width", "vocabulary")
_UNTRAINED = "random"


@dataclass(frozen=True)
class ComparedModel:
    """One model of a page.

    Attributes:
        name: Its name on the page.
        excerpt: Its excerpt.
        runs: Its finished runs.
    """

    name: str
    excerpt: Excerpt
    runs: Runs

    @property
    def shape(self) -> dict[str, Any]:
        """What two models have in common if heads at the same position correspond."""
        layers = {layer: int(logits.shape[0]) for layer, logits in sorted(self.excerpt.logits.items())}
        return {**{name: self.excerpt.facts.get(name) for name in _SHAPE}, "heads": layers}

    @property
    def architecture(self) -> str:
        """Its architecture in words."""
        shape = self.shape
        heads = " or ".join(map(str, sorted(set(shape["heads"].values()))))
        return f"{shape['type']}, {len(shape['heads'])} layers of {heads} heads, width {shape['width']}"

    def head_runs(self) -> dict[str, StoredRun]:
        """Return the run of every metric that single heads have, with the model's own weights."""
        by_metric: dict[str, StoredRun] = {}
        for _, run in self.runs.of_model:
            for metric in run.metrics:
                if metric.name in run.head_metrics:
                    by_metric.setdefault(metric.name, run)
        return by_metric


def compare_models(models: Sequence[ComparedModel]) -> dict[str, Any] | None:
    """Return the numbers of each model, their differences to the first, and its heads matched; None for one model."""
    first, *others = models
    if not others:
        return None
    return {"numbers": _numbers(models), "pairs": [_pair(first, other) for other in others]}


def difference(first: Mapping[str, float], second: Mapping[str, float], *, paired: bool) -> tuple[Interval, str]:
    """Return the second mean minus the first with its 95 % interval, and in words what the interval is over.

    Args:
        first: Values by document.
        second: Values by document.
        paired: Whether documents of the same name are the same texts; otherwise they are independent samples. A single
            common document among others is not paired, and the interval is then slightly too wide.
    """
    common = [name for name in first if name in second] if paired else []
    if len(common) > 1 or (common and min(len(first), len(second)) == 1):
        change = interval([second[name] - first[name] for name in common])
        return change, f"paired, {change.n} documents" if change.n > 1 else "one document"
    change = welch(list(first.values()), list(second.values()))
    return change, f"Welch, {len(first)} and {len(second)} documents"


def _numbers(models: Sequence[ComparedModel]) -> list[dict[str, Any]]:
    """Return one row per headline number and model: its value, its random control, and its difference to the first."""
    rows = []
    for wanted in WANTED:
        for metric, title in wanted.metrics:
            base = models[0].runs.find(wanted.measurement)
            for model in models:
                run = model.runs.find(wanted.measurement)
                summary = _summary(run, metric)
                if run is None or summary is None:
                    continue
                beside = {} if model.runs.own == _UNTRAINED else model.runs.weights(wanted.measurement)
                control = _summary(beside.get(_UNTRAINED), metric)
                change, over = None, ""
                if model is not models[0] and base is not None:
                    means = [each.document_means(metric) for each in (base, run)]
                    if all(means):
                        change, over = difference(*means, paired=_same_texts(base, run))
                rows.append(
                    {
                        "title": wanted.title,
                        "name": title,
                        "model": model.name,
                        "value": summary_json(summary),
                        "control": None if control is None else summary_json(control),
                        "difference": None if change is None else _difference_json(summary, change),
                        "over": over,
                    }
                )
    return rows


def _summary(run: StoredRun | None, metric: str) -> MetricSummary | None:
    return None if run is None else run.summary(metric)


def _difference_json(summary: MetricSummary, change: Interval) -> dict[str, Any]:
    """Return a difference; of shares of heads in percentage points, because the count beside it has no interval."""
    if not summary.counts:
        return interval_json(change)
    return interval_json(change, f"{in_words(change, percent=True).replace('%', 'points')} per document")


def _same_texts(first: StoredRun, second: StoredRun) -> bool:
    """Return whether documents of the same name have the same text in both runs."""
    listed = (cast("list[dict[str, str]]", run.directory.config["documents"]) for run in (first, second))
    hashes, other_hashes = ({document["name"]: document["sha256"] for document in documents} for documents in listed)
    common = hashes.keys() & other_hashes.keys()
    return bool(common) and all(hashes[name] == other_hashes[name] for name in common)


def not_matched(first: ComparedModel, other: ComparedModel) -> str | None:
    """Return why heads at the same position in two models do not correspond; None if one was trained from the other."""
    for model in (first, other):
        if model.runs.own != "trained":
            return f"{model.name} is a control with {model.runs.own} weights, not a fine-tuned model"
    if first.shape != other.shape:
        return f"the architectures differ ({first.architecture}; {other.architecture})"
    before, after = (model.excerpt.facts["sample"] for model in (first, other))
    correlation = _correlation(before, after) if len(before) == len(after) else None
    if correlation is None:
        return "their weights cannot be compared"
    if correlation < SAME_WEIGHTS:
        return f"the architecture is the same, but the weights are unrelated (correlation {correlation:.2f})"
    return None


def _pair(first: ComparedModel, other: ComparedModel) -> dict[str, Any]:
    """Return how the heads of a model differ from those of the first one, by metric, or why they do not correspond."""
    why = not_matched(first, other)
    pair: dict[str, Any] = {"first": first.name, "model": other.name, "why": why, "metrics": {}, "labels": None}
    if why is not None:
        return pair
    before, after = first.head_runs(), other.head_runs()
    for metric in (name for name in before if name in after):
        pair["metrics"][metric] = _changes(before[metric], after[metric], metric)
    pair["labels"] = _label_changes(first, other)
    return pair


def _changes(first: StoredRun, second: StoredRun, metric: str) -> dict[str, Any]:
    """Return the correlation of a metric over heads, and the heads that changed most with intervals over documents."""
    paired = _same_texts(first, second)
    before, after = first.head_documents(metric), second.head_documents(metric)
    places = [place for place in before if place in after]
    old, new = ([sum(values[place].values()) / len(values[place]) for place in places] for values in (before, after))
    changes = [difference(before[place], after[place], paired=paired) for place in places]
    order = sorted(range(len(places)), key=lambda i: -abs(changes[i][0].mean))[:CHANGED]
    return {
        "correlation": rounded(_correlation(old, new)),
        "heads": len(places),
        "changed": [
            {
                "layer": places[i][0],
                "head": places[i][1],
                "before": rounded(old[i]),
                "after": rounded(new[i]),
                "change": interval_json(changes[i][0]),
                "over": changes[i][1],
            }
            for i in order
        ],
    }


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None if a sequence is constant or there are fewer than two values."""
    if len(first) < 2:
        return None
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (first, second))
    x, y = x - x.mean(), y - y.mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size > 0 else None


def _label_changes(first: ComparedModel, other: ComparedModel) -> dict[str, Any] | None:
    """Return the number of heads by label before (rows) and after (columns); None if they were not labelled."""
    runs = [model.runs.find("heads") for model in (first, other)]
    before, after = ({} if run is None else head_labels(run) for run in runs)
    counts = [[0] * len(LABELS) for _ in LABELS]
    for place, code in before.items():
        if place in after:
            counts[code][after[place]] += 1
    return {"names": list(LABELS), "counts": counts} if any(map(any, counts)) else None
