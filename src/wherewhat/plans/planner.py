"""Make a plan: score heads on some documents, choose, and measure on others what the choice costs."""

from __future__ import annotations

import dataclasses
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.boundary import output_file, output_folder
from wherewhat.caches.plan import LayerHeads, Plan, fingerprint, plannable
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import ConfigError, MeasureError, TextError
from wherewhat.measures.statistics import interval
from wherewhat.measures.variants import LEAST_GAIN
from wherewhat.models.loaded import LoadedModel, evaluation
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import checked, nearest
from wherewhat.plans.costs import (
    OPERATIONS,
    PlanOutcome,
    fit_head_statistics,
    measure_additions,
    measure_head_costs,
    measure_plan,
    outcome_areas,
    outcome_curve,
)
from wherewhat.plans.exports import check_kinds, export_paths, finish_plan, probe_exports
from wherewhat.plans.goals import Attempt, attempt, distinct_shares, search_share
from wherewhat.plans.request import PlanRequest
from wherewhat.plans.selectors import (
    CANDIDATES,
    DRAWS,
    PLACED,
    RANKED,
    SCORED,
    Selector,
    chosen,
    combined_scores,
    document_scores,
    greedy_counts,
    greedy_scores,
    placed_layers,
    random_scores,
    rank_scores,
    unit_scores,
)
from wherewhat.plans.sentences import better_selector, describe_choice, describe_goal, describe_plan, with_interval
from wherewhat.plans.triattention import write_triattention
from wherewhat.progress import Progress, Silent, counted, duration, step
from wherewhat.runs.directory import RunDirectory, collect_versions, model_provenance
from wherewhat.runs.identity import loaded_model, texts_identity
from wherewhat.runs.request import MemoryModel, ModelRequest, document_text, file_names, model_request
from wherewhat.runs.subject import ModelSubject, load_model
from wherewhat.scores import Scores, stored_metric
from wherewhat.text.documents import Document, documents_of, read_documents

_REVISION = 3
"""Bump when results change, so that earlier runs are not reused."""

_AUTO_SHARES = (0.1, 0.25, 0.5)
"""Shares at which ``auto`` compares selectors where several are asked for, or another selector reaches a goal."""

_SUMMED: tuple[Selector, ...] = ("output", "costs")
"""Selectors whose scores are costs, which add up over the heads of a group."""

_Choice = Mapping[int, tuple[int, ...]]
"""Units that see the whole text, by layer."""

_Units = dict[int, Tensor]
"""Scores of units, ``(units,)`` by layer."""

_Numbers = Mapping[str, float | Mapping[int, Tensor]]
"""Numbers of one document by metric: of the model as a whole, or of heads by layer."""


@checked(model=model_request, files=file_names, texts=documents_of)
def make_plan(
    model: ModelRequest | MemoryModel,
    request: PlanRequest | None = None,
    *,
    files: tuple[str, ...] | None = None,
    texts: tuple[Document, ...] | None = None,
    out: str | os.PathLike[str] = "runs",
    triattention: str | os.PathLike[str] | None = None,
    exports: Mapping[str, str | os.PathLike[str]] | None = None,
    again: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Plan:
    """Make a plan of which heads of a model see the whole text.

    Heads are scored on a few documents, and the choice is measured on others: the rise of the loss beyond the window,
    and the gain from planted sequences. Finished documents are stored in a run directory and not measured again.

    Args:
        model: A name, folder or file, a model of transformers in memory, or what :func:`wherewhat.load` returned.
        request: What the plan has to reach; or give its fields as ``options``, such as ``budget=0.25``.
        files: Text files; by default the embedded prose.
        texts: Texts in place of files: strings, documents or token ids.
        out: Folder of run directories.
        triattention: Also write statistics of the documents for choosing to this file, see
            :func:`wherewhat.save_triattention`.
        exports: Also write the plan for these engines, see :func:`wherewhat.export_plan`. An engine that cannot run
            it is refused before anything is measured.
        again: Measure anew what is finished.
        progress: Progress callback; silent by default.
        options: Fields of :class:`PlanRequest`.
    """
    try:
        request = dataclasses.replace(request or PlanRequest(), **options)
    except TypeError as error:
        known = [field.name for field in dataclasses.fields(PlanRequest)]
        wrong = next((name for name in options if name not in known), "")
        raise ConfigError(f"there is no option '{wrong}' of a plan: {nearest(wrong, known)}") from error
    progress, out = progress or Silent(), output_folder(out, name="--out", writable=False)
    if triattention is not None:
        triattention = output_file(triattention, name="--triattention")
    paths = export_paths(exports or {}, others={"--triattention": triattention})
    check_kinds(paths, request.unit, request.sinks)
    needed = request.choosing + request.documents
    documents = list(texts) if texts is not None else read_documents(files)
    if len(documents) < needed:
        raise TextError(
            f"a plan needs {request.choosing} documents for choosing and {request.documents} others for measuring, but "
            f"there are {len(documents)}: give more texts, or fewer with --choose and --documents"
        )
    progress.say(f"loading {model.model}")
    with step(progress, f"loading {model.model}"):
        loaded = load_model(model, say=progress.say)
    with new_process_settings(weight_dtypes(loaded.model)), evaluation(loaded.model):
        with step(progress, f"preparing {model.model}"):
            planner = _Planner(loaded, request, documents[:needed], out, progress)
            blank = Plan(
                loaded.name, fingerprint(loaded.model), request.keys, request.sinks, planner.layers, {}, "layer"
            )
            probe_exports(loaded, planner.proof, paths, plan=blank)
            if triattention is not None:
                write_triattention(planner.subject, [planner.ids[name] for name in planner.choosing], triattention)
        plan = planner.plan(again=again)
        with step(progress, f"checking the cache and the exports of {model.model}"):
            use = {"context": request.context, "memory": request.memory_bytes}
            return finish_plan(loaded, planner.proof, plan, paths, **use)


class _Planner:
    """Makes one plan."""

    def __init__(
        self, loaded: LoadedModel, request: PlanRequest, documents: Sequence[Document], out: Path, progress: Progress
    ) -> None:
        self.loaded, self.request, self.progress = loaded, request, progress
        self.model: Any = loaded.model
        self.proof: Proof = prove(self.model)
        self.layers: dict[int, LayerHeads] = plannable(self.proof)
        if not self.layers:
            raise MeasureError(f"{loaded.name} has no layer with full attention: there is nothing to plan")
        self.subject = ModelSubject(loaded, self.proof)
        self.ids = {
            document.name: document_text(loaded, document, request.tokens, beyond=request.beyond).ids
            for document in documents
        }
        self.documents = documents
        self.choosing = [document.name for document in documents[: request.choosing]]
        self.evaluating = [document.name for document in documents[request.choosing :]]
        rotating = any(x.rotation is not None for x in self.proof.layout.layers if x.layer in self.layers)
        named = {request.selector, *request.compare}
        # Selectors that this model has no scores for; one that was named is an error.
        self.without: set[Selector] = set() if rotating or "distance" in named else {"distance"}
        self.keys: list[str] = []
        self.outcomes: dict[Any, PlanOutcome] = {}
        config: dict[str, Any] = {
            "measurement": "plan",
            "revision": _REVISION,
            **loaded_model(loaded),
            "window": request.keys,
            "sinks": request.sinks,
            "tokens": request.tokens,
            "options": {name: getattr(request, name) for name in ("unit", "selector", "costs", "curves")}
            | {"compare": list(request.compare), "share": request.share}
            | {"max_rise": request.max_rise, "min_found": request.min_found}
            | ({"greedy": True} if request.greedy else {}),
            **texts_identity(documents, [ids.tolist() for ids in self.ids.values()]),
            "choosing": len(self.choosing),
        }
        self.directory = RunDirectory.open(out, name=f"plan-{loaded.name}-{loaded.weights}", config=config)

    def plan(self, *, again: bool = False) -> Plan:
        """Return the finished plan."""
        selector = self.request.selector
        with self.directory.lock(on_wait=self.progress.say):
            if again:
                self.directory.clear()
            units, folds = self._scores()
            share, tried = self.request.share, list[Attempt]()
            if share is None:
                tried = self._search(folds)
                share = min(x.share for x in tried if x.reached)
            reached = {x.selector: x for x in tried if x.reached and x.share == share}
            auto: list[dict[str, Any]] | None = None
            if selector == "auto" and reached:
                auto = rank_selectors({name: x.costs for name, x in reached.items()})
            elif "auto" in self.request.selectors:
                auto = self._auto(folds)
            taken: Selector = auto[0]["selector"] if auto else "ranks"
            if auto is not None:
                units["auto"] = units[taken]
            taken = taken if selector == "auto" else selector
            outcomes = self._outcomes(units, share) if self.evaluating else []
            self.directory.finish(self.keys, provenance=model_provenance(self.loaded, self.documents))
        rows, base = outcome_curve(outcomes) if outcomes else ([], None)
        own = next((row for row in rows if row["selector"] == selector and row["share"] == share), None)
        if own is None and rows:  # all or nothing
            own = next(row for row in rows if row["share"] == share)
        sentence = describe_plan(self.request, share, own, base, len(self.evaluating))
        if auto and selector == "auto":
            sentence += f" {describe_choice(auto, len(self.choosing), tried)}"
        better = better_selector(rows, own) if own is not None else None
        if better is not None:
            sentence += (
                f" The selector {better['selector']} finds {with_interval(better['part'], percent=True)} at this "
                f"share, and the loss rises by {with_interval(better['rise'])}: use --selector {better['selector']}."
            )
        if taken in reached:
            sentence += f" {describe_goal(self.request, reached[taken], own, base)}"
        return Plan(
            model=self.loaded.name,
            fingerprint=fingerprint(self.model),
            window=self.request.keys,
            sinks=self.request.sinks,
            layers=self.layers,
            full=self._choices(units, selector, share)[0],
            unit=self.request.unit,
            scores={layer: tuple(x.tolist()) for layer, x in units.get(selector, {}).items()},
            provenance={
                "sentence": sentence,
                "selector": taken,
                "auto": auto,
                "share": share,
                "search": [x.row for x in tried],
                "tokens": self.request.tokens,
                "weights": self.loaded.weights,
                "weights_hash": self.loaded.weights_hash,
                "dtype": self.loaded.dtype,
                "device": self.loaded.device,
                "chosen_on": self.choosing,
                "evaluated_on": self.evaluating,
                "full_model": base,
                "outcome": own,
                "curve": rows,
                "areas": outcome_areas(outcomes) if outcomes else None,
                "run": self.directory.path.name,
                "versions": collect_versions(),
            },
        )

    def _part(self, key: str, name: str, compute: Callable[[str], _Numbers], *, unit: str = "nats") -> Scores:
        """Return the stored numbers of a document, computed now if they are missing."""
        self.keys.append(key)
        if not self.directory.has(key):
            started = time.perf_counter()
            whole: dict[str, float] = {}
            heads: dict[int, dict[str, Tensor]] = {}
            for metric, value in compute(name).items():
                if isinstance(value, float):
                    whole[metric] = value
                    continue
                for layer, x in value.items():
                    heads.setdefault(layer, {})[metric] = x
            scores = Scores(layers=[Scores(layer=layer, heads=x) for layer, x in heads.items()], whole=whole)
            scores = scores.checked([stored_metric("*", unit=unit)], of="plan")
            self.directory.save(key, scores, document=name, seconds=time.perf_counter() - started)
        return self.directory.part(key)

    def _scores(self) -> tuple[dict[Selector, _Units], dict[str, dict[Selector, _Units]]]:
        """Return the scores of units by selector: from all documents for choosing, and for each from the others.

        With one document for choosing, the latter are those of this document. Those of ``greedy`` are from all.
        """
        request = self.request
        needed = {*request.selectors, *(CANDIDATES if "auto" in request.selectors else ())}
        ranked = RANKED if "ranks" in needed else ()
        asked = [name for name in SCORED if name in needed or name in ranked or request.costs]
        wanted = [name for name in asked if name not in self.without]

        def compute(name: str) -> _Numbers:
            scores = document_scores(
                self.subject,
                self.model,
                self.proof,
                self.ids[name],
                self.layers,
                selectors=wanted,
                window=request.keys,
                sinks=request.sinks,
            )
            return {f"score_{selector}": x for selector, x in scores.items()}

        tracked = self.progress.track(self.choosing, "scores of heads")
        stored = [self._part(f"choose:{name}", name, compute, unit="") for name in tracked]
        by_selector: dict[Selector, list[dict[int, Tensor]]] = {
            selector: [{x.layer: x.heads[f"score_{selector}"] for x in document.layers} for document in stored]
            for selector in wanted
        }
        if request.costs:
            by_selector["costs"] = self._costs()

        def means_of(documents: Sequence[int]) -> dict[Selector, dict[int, Tensor]]:
            means = {selector: _mean([each[index] for index in documents]) for selector, each in by_selector.items()}
            if request.costs:
                means["combined"] = combined_scores([means[name] for name in wanted], means["costs"])
            if ranked:
                means["ranks"] = rank_scores([means[name] for name in ranked if name in wanted])
            return means

        every = range(len(self.choosing))
        means = means_of(every)
        if request.selector == "random":
            means["random"] = random_scores(self.layers, 0)
        if request.greedy:
            counts = self.progress.track(greedy_counts(self.layers, request.unit), "greedy rounds")
            means["greedy"] = greedy_scores(self.layers, request.unit, counts, self._additions)
        folds = {
            name: self._units(means | means_of([other for other in every if other != index] or [index]))
            for index, name in enumerate(self.choosing)
        }
        return self._units(means), folds

    def _units(self, scores: Mapping[Selector, Mapping[int, Tensor]]) -> dict[Selector, _Units]:
        """Return scores of units from those of heads."""
        unit = self.request.unit
        return {name: unit_scores(x, self.layers, unit, summed=name in _SUMMED) for name, x in scores.items()}

    def _auto(self, folds: Mapping[str, Mapping[Selector, _Units]]) -> list[dict[str, Any]]:
        """Compare the cheap selectors on the documents for choosing, each with scores of the others.

        Returns:
            ``selector`` and ``cost`` of each, the one to take first: rise of the loss plus lost retrieval, nats, with
            the interval over documents. Others are in the order of their costs. Nothing, if all units or none are
            kept, whatever the selector.
        """
        request = self.request
        several = request.share is None or request.curves
        shares = [x for x in (_AUTO_SHARES if several else (request.share or 0.0,)) if 0 < x < 1]
        if not shares:
            return []
        names = [name for name in CANDIDATES if name not in self.without]

        def compute(name: str) -> _Numbers:
            base = self._measured(name, None)
            costs = {}
            for selector in names:
                each = [self._measured(name, chosen(folds[name][selector], share)) for share in shares]
                costs[f"cost_{selector}"] = sum(x.loss - base.loss + base.found - x.found for x in each) / len(each)
            return costs

        tracked = self.progress.track(self.choosing, "choice of a selector")
        stored = [self._part(f"auto:{name}", name, compute).whole for name in tracked]
        return rank_selectors({selector: [x[f"cost_{selector}"] for x in stored] for selector in names})

    def _additions(self, full: _Choice) -> dict[int, Tensor]:
        """Return how much the cost falls if a unit is added to a choice, mean over the documents for choosing."""
        request = self.request
        count = sum(map(len, full.values()))

        def compute(name: str) -> _Numbers:
            started = time.perf_counter()
            falls = measure_additions(
                self.model,
                self.proof,
                self.ids[name],
                self._full_heads(full),
                unit=request.unit,
                window=request.keys,
                sinks=request.sinks,
            )
            if count == 0 and name == self.choosing[0]:
                counts = greedy_counts(self.layers, request.unit)
                total = sum(x.units(request.unit) for x in self.layers.values())
                rounds = sum(1 - before / total for before in (0, *counts[:-1])) * len(self.choosing)
                what = f"{len(counts)} greedy rounds on {counted(len(self.choosing), 'document')}"
                self.progress.say(f"{what}: about {duration((time.perf_counter() - started) * rounds)}")
            return {
                f"{metric}_{count}": {layer: x[index] for layer, x in falls.items()}
                for index, metric in enumerate(("fall", "gained"))
            }

        stored = [self._part(f"greedy:{count}:{name}", name, compute) for name in self.choosing]
        return _mean([_sums(document, f"fall_{count}", f"gained_{count}") for document in stored])

    def _costs(self) -> list[dict[int, Tensor]]:
        """Return the measured cost of limiting each head, by document for choosing; others give the statistics."""
        request = self.request
        operations = OPERATIONS if len(self.choosing) > 1 else ("window",)

        def compute(name: str) -> _Numbers:
            others = [other for other in self.choosing if other != name] or [name]
            statistics = fit_head_statistics(self.subject, [self.ids[other] for other in others])
            costs = measure_head_costs(
                self.model,
                self.proof,
                self.ids[name],
                statistics,
                window=request.keys,
                sinks=request.sinks,
                operations=operations,
                progress=self.progress,
            )
            return {
                f"{what}_{operation}": {layer: x[0] for layer, x in by_layer.items()}
                for what, values in (("rise", costs.rise), ("lost", costs.lost))
                for operation, by_layer in values.items()
            }

        stored = [self._part(f"costs:{name}", name, compute) for name in self.choosing]
        return [_sums(document, "rise_window", "lost_window") for document in stored]

    def _search(self, folds: Mapping[str, Mapping[Selector, _Units]]) -> list[Attempt]:
        """Return what was measured to find the smallest share that reaches the goal; for ``auto`` of all candidates.

        Each document for choosing is measured with scores of the others.
        """
        request = self.request

        def unchanged(name: str) -> _Numbers:
            return dataclasses.asdict(self._measured(name, None))

        base = [_outcome(self._part(f"unchanged:{name}", name, unchanged).whole) for name in self.choosing]
        gain = statistics.fmean(x.found for x in base)
        if request.min_found is not None and gain <= LEAST_GAIN:
            raise MeasureError(
                f"{self.loaded.name} gains {gain:.3f} nats from planted sequences on the documents for choosing: there "
                "is no retrieval to keep a part of; leave --min-found out"
            )

        def measure(share: float, selectors: Sequence[Selector]) -> list[Attempt]:
            def compute(name: str) -> _Numbers:
                numbers: dict[str, float] = {}
                for selector in selectors:
                    own = self._measured(name, self._choices(folds[name], selector, share)[0])
                    numbers |= {f"{metric}_{selector}_{share:g}": x for metric, x in dataclasses.asdict(own).items()}
                return numbers

            tracked = self.progress.track(self.choosing, f"plans that keep {share:.0%}")
            stored = [self._part(f"goal:{name}:{share:g}", name, compute).whole for name in tracked]
            return [
                attempt(request, selector, share, base, [_outcome(whole, f"_{selector}_{share:g}") for whole in stored])
                for selector in selectors
            ]

        candidates = [name for name in CANDIDATES if name not in self.without]
        shares = distinct_shares(sum(x.units(request.unit) for x in self.layers.values()))
        tried = search_share(candidates if request.selector == "auto" else [request.selector], shares, measure)
        if not any(x.reached for x in tried):
            nearest = min((x for x in tried if x.share == shares[-1]), key=lambda x: x.missed)
            by = f" by {nearest.selector}" if request.selector == "auto" else ""
            goals = {"a larger --max-rise": request.max_rise, "a smaller --min-found": request.min_found}
            advice = ", ".join(name for name, goal in goals.items() if goal is not None)
            raise MeasureError(
                f"no plan that keeps at most {nearest.share:.0%} of the {request.unit}s reaches the goal on the "
                f"documents for choosing; the nearest keeps {nearest.share:.0%}{by}, with {nearest.in_words}, and "
                f"misses it by {nearest.missed:.2g} nats: give {advice} or a larger --window"
            )
        return tried

    def _choices(
        self, units: Mapping[Selector, Mapping[int, Tensor]], selector: Selector, share: float
    ) -> list[_Choice]:
        """Return what a selector chooses: one choice, or several random ones."""
        if selector in PLACED:
            return [placed_layers(selector, self.layers, share)]
        if selector != "random":
            return [chosen(units[selector], share)]
        draws = range(DRAWS if self.request.curves else 1)
        return [chosen(self._units({"random": random_scores(self.layers, seed)})["random"], share) for seed in draws]

    def _full_heads(self, full: _Choice) -> dict[int, tuple[bool, ...]]:
        """Return for each query head whether it sees everything, by layer, from a choice of units."""
        plan = Plan("", "", self.request.keys, self.request.sinks, self.layers, full, self.request.unit)
        return {layer: plan.full_heads(layer) for layer in self.layers}

    def _measured(self, name: str, full: _Choice | None) -> PlanOutcome:
        """Return loss and retrieval of a document with a choice of units; None for the unchanged model.

        Selectors and shares that choose the same units are measured once.
        """
        request = self.request
        heads = {} if full is None else self._full_heads(full)
        key = name, tuple(heads.items())
        if key not in self.outcomes:
            self.outcomes[key] = measure_plan(
                self.model, self.proof, self.ids[name], heads, window=request.keys, sinks=request.sinks
            )
        return self.outcomes[key]

    def _outcomes(self, units: Mapping[Selector, Mapping[int, Tensor]], share: float) -> list[dict[str, float]]:
        """Return loss and gain of each document for evaluation, by selector and share."""
        request = self.request
        cells: dict[str, list[_Choice]] = {"none_0": [dict.fromkeys(self.layers, ())]}
        for selector, shares in request.shares(share).items():
            if selector in self.without:
                continue
            cells |= {f"{selector}_{kept!r}": self._choices(units, selector, kept) for kept in shares}
        plans = 1 + len({tuple(sorted(choice.items())) for choices in cells.values() for choice in choices})

        def compute(name: str) -> _Numbers:
            started = time.perf_counter()
            base = self._measured(name, None)
            if name == self.evaluating[0]:
                seconds = (time.perf_counter() - started) * plans * len(self.evaluating)
                count = f"{plans} plans on {counted(len(self.evaluating), 'document')} of {request.tokens} tokens"
                self.progress.say(f"{count}: about {duration(seconds)}")
            rows: dict[str, float] = {"loss": base.loss, "found": base.found}
            for cell, choices in cells.items():
                each = [self._measured(name, choice) for choice in choices]
                rows[f"loss_{cell}"] = sum(x.loss for x in each) / len(each)
                rows[f"found_{cell}"] = sum(x.found for x in each) / len(each)
            return rows

        tracked = self.progress.track(self.evaluating, "plans")
        return [dict(self._part(f"evaluate:{name}:{share:g}", name, compute).whole) for name in tracked]


def _outcome(numbers: Mapping[str, float], ending: str = "") -> PlanOutcome:
    """Return the outcome whose numbers have names with this ending."""
    return PlanOutcome(numbers[f"loss{ending}"], numbers[f"found{ending}"])


def _sums(scores: Scores, first: str, other: str) -> dict[int, Tensor]:
    """Return the sum of two scores of heads, by layer."""
    return {x.layer: x.heads[first] + x.heads[other] for x in scores.layers}


def _mean(scores: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Return the mean over documents of scores of heads, by layer."""
    return {layer: torch.stack([layers[layer].double() for layers in scores]).mean(0) for layer in scores[0]}


def rank_selectors(costs: Mapping[Selector, Sequence[float]]) -> list[dict[str, Any]]:
    """Return selectors with their mean costs over documents and intervals, the one to take first.

    That is the one with the lowest mean. If its advantage over ``ranks``, where that is one of them, is at most the
    standard error of the differences between them on the same documents, it is ``ranks``.
    """
    order = sorted(costs, key=lambda name: (statistics.fmean(costs[name]), name != "ranks"))
    if "ranks" in costs:
        gains = list(map(operator.sub, costs["ranks"], costs[order[0]]))
        if statistics.fmean(gains) <= statistics.stdev(gains) / len(gains) ** 0.5:
            order = ["ranks", *(name for name in order if name != "ranks")]
    rows = []
    for name in order:
        estimate = interval(costs[name])
        rows.append({"selector": name, "cost": {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}})
    return rows
