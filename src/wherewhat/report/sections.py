"""The data of each section of a report, read from run directories."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from wherewhat.caches.plan import Plan
from wherewhat.errors import ConfigError, printable
from wherewhat.files import canonical_json
from wherewhat.measures.measurement import ChoicesMeasurement, QuestionMeasurement
from wherewhat.measures.statistics import Interval
from wherewhat.progress import counted
from wherewhat.report.claims_page import claims_data
from wherewhat.report.data import (
    Number,
    Value,
    band,
    centred_curves,
    drawn_distances,
    headline,
    interval_json,
    metric_tables,
    packed_rows,
    rounded,
    rounded_list,
    sizes,
    summary_json,
    terms,
)
from wherewhat.report.excerpt import REPEATED_NAME, Excerpt
from wherewhat.report.figures import figure, pareto_figure
from wherewhat.report.run_sections import bands, controlled_distance, lengths, perturbation, roles, swaps
from wherewhat.report.telling import telling_heads
from wherewhat.rules.captions import captions
from wherewhat.rules.findings import find, summarise
from wherewhat.rules.rule import Statement
from wherewhat.runs.collection import Runs
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.request import option_text
from wherewhat.runs.results import StoredRun
from wherewhat.runs.schema import profile_name

T = TypeVar("T")


def head_records(
    runs: Runs, excerpt: Excerpt, layers: Sequence[int], distances: Sequence[int]
) -> list[list[dict[str, Any]]]:
    """Return for each layer and head the data of its panel.

    Each has the logit of its sink, its planes, the mean distance curve over documents with half the width of its
    interval, and for each drawn document its logits and its curves, so that ``a[i-j] + b[i] + c[j]`` is the fit. The
    last of them are the repeated random tokens, which have no curves.
    ``a`` is stored as its difference to the mean curve, plus the number ``level``; the logits of further documents as
    their difference to the fit, which eight bits represent well.
    """
    heads, planes, frequencies = (runs.find(name) for name in ("heads", "planes", "frequencies"))
    records = []
    for layer in layers:
        by_plane = {
            "use": _curve(heads, layer, "frequency_use"),
            "share": _curve(planes, layer, "plane_share"),
            "plane_pos": _curve(frequencies, layer, "plane_s_pos"),
            "plane_sym": _curve(frequencies, layer, "plane_s_sym"),
        }
        packs = {name: packed_rows(x, bits=16) for name, x in by_plane.items() if x is not None}
        repeated = None if excerpt.repeated is None else packed_rows(excerpt.repeated.logits[layer], bits=16)
        of_heads = enumerate(_documents(runs, excerpt, layer, distances))
        listed = [{**{name: rows[head] for name, rows in packs.items()}, **record} for head, record in of_heads]
        for head, record in enumerate(listed):
            if repeated is not None:
                record["documents"].append({"map": repeated[head]})
            if layer in excerpt.sinks:
                record["sink"] = rounded(excerpt.sinks[layer][head])
        records.append(listed)
    return records


def _documents(runs: Runs, excerpt: Excerpt, layer: int, distances: Sequence[int]) -> list[dict[str, Any]]:
    """Return the curves of every head of a layer, over documents and on each drawn one, and its logits there."""
    axes = runs.find("axes")
    count = 0 if axes is None else len(axes.documents)
    curves = [curve for d in range(count) if axes and (curve := axes.curve(layer, "a", document=d)) is not None]
    logits = [passage.logits[layer].double() for passage in excerpt.passages]
    if axes is None or len(curves) < count:
        packs = [packed_rows(x, bits=8 if number else 16) for number, x in enumerate(logits)]
        return [{"documents": [{"map": pack} for pack in of_head]} for of_head in zip(*packs, strict=True)]
    centred, levels = _centred(curves, distances)
    mean, half = band(centred)
    listed: list[dict[str, Any]] = [{"mean": pack, "documents": []} for pack in packed_rows(mean, bits=16)]
    for document, values in enumerate(logits):
        b, c = (axes.profiles[profile_name(axes.documents[document], layer, name)].double() for name in "bc")
        rows = int((2 * values.shape[1]) ** 0.5)
        i, j = torch.tril_indices(rows, rows).unbind()
        padded = torch.nn.functional.pad(curves[document].double(), (0, rows), value=torch.nan)
        rest = values - (padded[:, i - j] + b[:, i] + c[:, j])
        packs_of: dict[str, list[Any]] = {
            "a": packed_rows(centred[document] - mean, bits=8),
            "level": [float(f"{level:.7g}") for level in levels[document].flatten().tolist()],
            "b": packed_rows(b[:, :rows], bits=16),
            "c": packed_rows(c[:, :rows], bits=16),
            **({"rest": packed_rows(rest, bits=8)} if document else {"map": packed_rows(values, bits=16)}),
        }
        for head, record in enumerate(listed):
            record["documents"].append({name: of_heads[head] for name, of_heads in packs_of.items()})
        if not document:
            once = {"key": packed_rows(c, bits=8), **({"half": packed_rows(half, bits=8)} if len(curves) > 1 else {})}
            for head, record in enumerate(listed):
                record |= {name: of_heads[head] for name, of_heads in once.items()}
    return listed


def _centred(curves: Sequence[Tensor], distances: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return distance curves as :func:`centred_curves` does, at the distances that the longest of them has."""
    longest = max(curve.shape[1] for curve in curves)
    return centred_curves(curves, [distance for distance in distances if distance < longest])


def control_curves(
    runs: Runs, layers: Sequence[int], distances: Sequence[int]
) -> dict[str, list[list[dict[str, Any]] | None]]:
    """Return for each control model, by layer, the mean distance curve of every head with its interval's half width."""
    listed: dict[str, list[list[dict[str, Any]] | None]] = {}
    for weights, run in runs.weights("axes").items():
        if weights == runs.own:
            continue
        by_layer = listed.setdefault(weights, [])
        for layer in layers:
            every = [run.curve(layer, "a", document=document) for document in range(len(run.documents))]
            curves = [curve for curve in every if curve is not None]
            if not curves:
                by_layer.append(None)
                continue
            mean, half = band(_centred(curves, distances)[0])
            packs = {"mean": packed_rows(mean, bits=8)}
            if len(curves) > 1:
                packs["half"] = packed_rows(half, bits=8)
            by_layer.append([dict(zip(packs, of_head, strict=True)) for of_head in zip(*packs.values(), strict=True)])
    return listed


def turns_per_token(runs: Runs, layers: Sequence[int]) -> list[list[float | None] | None]:
    """Return the turns per token of each plane by layer; None for layers without RoPE."""
    planes = runs.find("planes")
    curves = (_curve(planes, layer, "plane_turns_per_token") for layer in layers)
    return [None if turns is None else rounded_list(turns) for turns in curves]


def _curve(run: StoredRun | None, layer: int, name: str) -> Tensor | None:
    return None if run is None else run.curve(layer, name)


def collect(runs: Runs, excerpt: Excerpt, *, name: str) -> dict[str, Any]:
    """Return everything that a page shows of one model, under a name that is unique on the page."""
    request, first = runs.first
    layers = sorted(excerpt.logits)
    distances = drawn_distances(len(excerpt.passages[0].tokens))

    def section(measurement: str, show: Callable[[StoredRun], dict[str, Any] | None]) -> dict[str, Any] | None:
        run = runs.find(measurement)
        return None if run is None else show(run)

    summary, scores = summarise(runs), section("heads", lambda run: swaps(run, layers))
    telling, without = telling_heads(scores, excerpt, layers)
    heads = {weights: run for weights, run in runs.weights("heads").items() if "s_pos" in run.head_metrics}
    controls = {weights: swaps(run, layers) for weights, run in heads.items() if weights != runs.own}
    return {
        "model": {
            "unmeasured": [],
            **{fact: value for fact, value in excerpt.facts.items() if fact != "sample"},
            "name": name,
            "layers": layers,
            "kinds": first.kinds,
            "heads": [int(excerpt.logits[layer].shape[0]) for layer in layers],
            "documents": len(first.documents),
            "tokens": request.tokens,
            "embedded": request.files is None and request.texts is None,
        },
        "summary": None if summary is None else _sentence(summary),
        "telling": {"heads": telling, "missing": without},
        "findings": [_sentence(finding) for finding in find(runs).values()],
        "captions": captions(runs),
        "numbers": [_number(number) for number in headline(runs)],
        "sizes": sizes(runs),
        "terms": terms(runs),
        "metrics": metric_tables(runs, layers),
        "swaps": None if scores is None else {**scores, "controls": controls},
        "roles": roles(heads, layers),
        "records": head_records(runs, excerpt, layers, distances),
        "control_curves": control_curves(runs, layers, distances),
        "distances": distances,
        "turns": turns_per_token(runs, layers),
        "texts": [
            {"document": printable(document), "tokens": passage.tokens}
            for document, passage in zip(
                [*first.documents[: len(excerpt.passages)], REPEATED_NAME],
                [*excerpt.passages, *([] if excerpt.repeated is None else [excerpt.repeated])],
                strict=False,
            )
        ],
        "distance": section("distance", controlled_distance),
        "perturbation": section("perturb", perturbation),
        "lengths": section("extend", lengths),
        "bands": section("frequencies", bands),
        "claims": _first_undamaged(runs.claims, claims_data),
        "others": [
            *(
                {**numbers_and_figure(other.runs), "more": other.more, "command": other.command}
                for other in runs.others
            ),
            *filter(None, [_first_undamaged(runs.plans, _plan)]),
        ],
        "method": [
            {"name": measurement.name, "summary": measurement.summary, "limits": measurement.limits}
            for measurement in dict.fromkeys(run.measurement for run in runs.shown)
        ],
        "left_out": runs.left_out,
        "runs": [_run(run.directory) for run in runs.shown],
    }


def _sentence(statement: Statement) -> dict[str, str]:
    return {"short": statement.short, "text": statement.text, "link": statement.link}


def numbers_and_figure(runs: Mapping[str, StoredRun]) -> dict[str, Any]:
    """Return the metrics of one measurement with intervals and controls, and its figure; the model's run is first."""
    (_, run), *controls = runs.items()
    beside = {
        weights: {summary.metric.name: summary_json(summary) for summary in other.summaries}
        for weights, other in controls
    }
    rows = [
        {
            "title": summary.metric.title,
            "unit": summary.metric.unit,
            "reading": summary.metric.reading,
            "value": summary_json(summary),
            "control": rounded(summary.control),
            "control_title": summary.metric.control_title,
            "controls": {weights: named[metric] for weights, named in beside.items() if metric in named},
        }
        for summary in run.summaries
        for metric in [summary.metric.name]
    ]
    try:
        drawn = json.loads(figure(run).to_json())
    except ConfigError:  # no map without scores of single heads
        drawn = None
    measurement = run.measurement
    return {
        "name": measurement.name,
        "summary": measurement.summary,
        "about": _about(run),
        "rows": rows,
        "figure": drawn,
    }


def _first_undamaged(files: Sequence[T], show: Callable[[T], dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the page shows of the first file that is not damaged; None if there is none."""
    for file in files:
        with suppress(KeyError, TypeError, ValueError):
            return show(file)
    return None


def _plan(plan: Plan) -> dict[str, Any]:
    """Return the costs of a plan and its figure, in the form of a measurement."""
    provenance = plan.provenance
    metrics = {
        "rise": ("rise of the loss", "nats", "Loss beyond the window minus that of the unchanged model."),
        "found": ("gain from planted sequences", "nats", "Gain in log-probability of the tokens of planted sequences."),
        "part": ("part of the gain", "", "Gain from planted sequences relative to that of the unchanged model."),
    }
    curve = sorted(provenance["curve"], key=lambda row: (row["share"], row["selector"]))
    areas = provenance.get("areas", {}).get("rows", [])
    shown = [(row, metric, f"{row['share']:.0%} of the {plan.unit}s") for row in curve for metric in ("rise", "found")]
    if len(areas) > 1:
        shown += [(row, metric, "mean over all shares") for row in areas for metric in ("rise", "part") if row[metric]]
    rows = [
        {
            "title": f"{metrics[metric][0]}, {row['selector']}, {where}",
            "unit": metrics[metric][1],
            "reading": metrics[metric][2],
            "value": interval_json(
                Interval(row[metric]["mean"], row[metric]["low"], row[metric]["high"], row[metric].get("n", 3))
            ),
            "control": None,
            "control_title": "",
            "controls": {},
        }
        for row, metric, where in shown
    ]
    count = len(provenance["evaluated_on"])
    return {
        "name": "plan",
        "summary": provenance["sentence"],
        "about": f"Heads are scored on {counted(len(provenance['chosen_on']), 'document')} of {provenance['tokens']} "
        f"tokens, and plans measured in {provenance['dtype']} on {counted(count, 'other document')}; intervals are "
        "95 % over these.",
        "rows": rows,
        "figure": json.loads(pareto_figure(plan).to_json()),
        "more": 0,
        "command": None,
    }


def _about(run: StoredRun) -> str:
    """Return what a run was measured on, in a sentence."""
    config, measurement = run.directory.config, run.measurement
    defaults = json.loads(canonical_json(asdict(measurement.config())))
    words = {QuestionMeasurement: "prompt", ChoicesMeasurement: "item"}
    word = next((word for kind, word in words.items() if isinstance(measurement, kind)), "document")
    count, each = len(run.documents), f" of {config['tokens']} tokens" if word == "document" else ""
    # By name, since a new run has its options in another order than a stored one.
    changed = {name: value for name, value in sorted(run.options.items()) if value != defaults.get(name)}
    options = ", ".join(f"{name}={option_text(value)}" for name, value in changed.items())
    over = f"; intervals are 95 % over {word}s" if count > 1 else ""
    return (
        f"Measured in {config['dtype']} on {counted(count, word)}{each}{over}."
        f"{f' Options other than the defaults: {options}.' if options else ''}"
    )


def result_data(runs: Mapping[str, StoredRun], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that the page of one measurement shows.

    The runs are by weights, the model's first; ``left_out`` says why a control model is missing, by its weights.
    """
    weights, run = next(iter(runs.items()))
    measurement = run.measurement
    model = {
        "model": {"weights": weights, "unmeasured": []},
        "others": [{**numbers_and_figure(runs), "more": 0, "command": None}],
        "method": [{"name": measurement.name, "summary": measurement.summary, "limits": measurement.limits}],
        "left_out": [f"{name} control: {reason}" for name, reason in left_out.items()],
        "runs": [_run(stored.directory) for stored in runs.values()],
    }
    return {"models": [model], "title": f"{measurement.name}: {run.title}", "command": None}


def _number(number: Number) -> dict[str, Any]:
    def listed(values: list[Value]) -> list[dict[str, Any]]:
        return [{"name": value.name, "of": value.of, **interval_json(value.value, value.words)} for value in values]

    return {
        "title": number.title,
        "values": listed(number.values),
        "controls": listed(number.controls),
        "kinds": listed(number.kinds),
        "reading": number.reading,
        "price": number.price,
        "measurement": number.measurement,
        "metrics": list(number.metrics),
    }


def _run(directory: RunDirectory) -> dict[str, Any]:
    """Return configuration and provenance; of the path only the name, which does not depend on the folder."""
    provenance = dict(directory.provenance())
    provenance.pop("parts", None)
    # Key order as in the file, so that a new run and a stored one give the same page.
    config = json.loads(canonical_json(directory.config))
    return {"name": directory.path.name, "config": config, "provenance": provenance}
