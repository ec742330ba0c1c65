"""The multi-hop study as one HTML page: the figures of arXiv 2605.31558 over seeds, beside the paper's values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.chart_style import LEGEND, SCALE, UNIT, axis, band, line_style, plain
from wherewhat.measures.statistics import Interval, in_words
from wherewhat.measures.swaps import LABELS
from wherewhat.report.data import rounded
from wherewhat_lab.constructions.discrepancy import (
    index_bound,
    index_discrepancy,
    retrieval_bound,
    retrieval_discrepancy,
)
from wherewhat_lab.multihop.figures import (
    INDEX_ANGLE,
    LETTERS,
    PAPER,
    RETRIEVAL_ANGLE,
    ROLES,
    RunFigures,
    frequency_ids,
    unscaled_use,
)
from wherewhat_lab.multihop.learning import PURE, interval_of_known
from wherewhat_lab.multihop.tables import heads_text
from wherewhat_lab.study import write_study_page

Column = Tensor | Sequence[Interval | float | str | None]
"""Values of a curve or of a table's column: ``(seeds, points)``, or one value for each point, such as the paper's."""

Part = dict[str, Any]
"""A chart or a table, as plain JSON."""

Parts = tuple[list[Part], list[Part]]
"""Charts and tables of one task in one section."""

Runs = Sequence[RunFigures]
"""Runs of one task with different seeds."""

_CATEGORIES = {"type": "category"}
"""An axis of layers in a heatmap, without fractions of layers."""


def write_page(file: Path, by_task: Mapping[str, Runs]) -> Path:
    """Write the page of the runs of each task atomically and return its path."""
    return write_study_page(
        file,
        "wherewhat_lab.multihop",
        title="wherewhat: multi-hop tasks, figure by figure",
        data=page_data(by_task),
        runs=[figures.run for runs in by_task.values() for figures in runs],
    )


def page_data(by_task: Mapping[str, Runs]) -> dict[str, Any]:
    """Return everything that the page shows but its runs, as plain JSON."""
    seeds = "; ".join(
        f"{task}: {', '.join(str(figures.run.seed) for figures in runs)}" for task, runs in by_task.items()
    )
    model = next(iter(by_task.values()))[0].run.setup.model
    sections = []
    for title, note, draw in SECTIONS:
        parts = [draw(task, runs) for task, runs in by_task.items()] if draw else [_discrepancy()]
        charts, tables = ([item for part in parts for item in part[kind]] for kind in (0, 1))
        sections.append({"title": title, "note": note, "charts": charts, "tables": tables})
    return {
        "about": "The figures of Urrutia et al., 2026 (arXiv 2605.31558), from models trained here, beside the paper's "
        f"values. Layers: {model.layers}, heads of each: {model.heads}, width: {model.width}, encoding: "
        f"{model.encoding}. Seeds: {seeds}. Values are means over seeds; bands and ± are 95 % Student intervals over "
        "seeds, for two or more. Dotted lines with crosses are the paper's. Layers and positions count from 0, "
        "frequency IDs from 1, the fastest plane. A layer with several heads shows their mean.",
        "sections": sections,
    }


def _scores(task: str, runs: Runs) -> Parts:
    paper = PAPER[task]
    columns: dict[str, Column] = {
        "s_pos": _by_layer(runs, "s_pos")[:, -1],
        "paper's s_pos": paper.s_pos,
        "s_sym": _by_layer(runs, "s_sym")[:, -1],
        "paper's s_sym": paper.s_sym,
    }
    layers = _layers(runs)
    chart = _chart(f"{task} task", "layer", "score", _lines(layers, columns, most=1), unit=True)
    return [chart], [_table(f"{task} task", {"layer": layers, **columns})]


def _learning(task: str, runs: Runs) -> Parts:
    records, paper, first = [figures.records for figures in runs], PAPER[task], runs[0].purity
    steps: list[int] = records[0].steps.tolist()
    accuracy = torch.stack([record["accuracy"] for record in records])
    curves = {_hops(hops): accuracy[..., index] for index, hops in enumerate(records[0]["hops"].tolist())}
    mark = {"x0": paper.best_step, "x1": paper.best_step, "y0": 0, "y1": 1, "yref": "paper", "type": "line"}
    shapes = [{**mark, "line": {"dash": "dot", "width": 1, "color": "#7F7F7F"}}]
    traces = _lines(steps, curves, most=1, mode="lines")
    charts = [_chart(f"{task} task: accuracy", "training step", "accuracy", traces, unit=True, shapes=shapes)]
    since, heads = {}, records[0]["s_pos"][0].numel()
    by_layer: dict[str, Column] = {"layer": _layers(runs)}
    for at, gamma in enumerate(first.gammas):
        counts = {
            f"{kind} {when}": torch.stack([pure[at, :, LABELS.index(kind)] for pure in listed])
            for kind in PURE
            for when, listed in {
                "now": [figures.purity.counts for figures in runs],
                "ever": [figures.purity.ever for figures in runs],
            }.items()
        }
        title = f"{task} task: pure heads, γ = {gamma:g}"
        charts.append(
            _chart(title, "training step", "heads", _lines(steps, counts, most=heads, mode="lines"), shapes=shapes)
        )
        became = torch.stack([figures.purity.since[at] for figures in runs]).double()
        since[f"γ = {gamma:g}"] = became.masked_fill(became < 0, math.nan).nanmean(2)
        by_layer[f"label at the end, γ = {gamma:g}"] = _votes(
            [figures.purity.final[at] for figures in runs], (*LABELS, "none")
        )
        apart = [figures.purity_no_sink.final[at] for figures in runs if figures.purity_no_sink is not None]
        if apart:
            by_layer[f"label without the sink, γ = {gamma:g}"] = _votes(apart, (*LABELS, "none"))
        by_layer[f"pure since step, γ = {gamma:g}"] = since[f"γ = {gamma:g}"]
    title = f"{task} task: step from which on heads stay pure"
    traces = _lines(_layers(runs), since, most=steps[-1], mode="markers")
    charts.append(_chart(title, "layer", "training step", traces))
    lowest, where = _by_layer(runs, "s_sym").min(1)
    by_layer |= {"smallest s_sym of all steps": lowest, "at step": records[0].steps[where]}
    by_layer["paper's smallest s_sym"] = [paper.lowest_s_sym.get(layer, "") for layer in _layers(runs)]
    return charts, [_summary(task, runs), _table(f"{task} task, by layer", by_layer)]


def _summary(task: str, runs: Runs) -> Part:
    """Return accuracy, steps and numbers of pure heads of a task, over seeds and of the paper."""
    paper, learning = PAPER[task], [figures.learning for figures in runs]
    best_steps = [figures.run.best_step for figures in runs]
    rows: list[tuple[str, Sequence[float], str, str]] = [
        ("test accuracy, last checkpoint", [figures.run.test().overall for figures in runs], "", ""),
        ("first step with the largest accuracy", best_steps, "", f"{paper.best_step:,}"),
    ]
    for index, hops in enumerate(learning[0].hops):
        steps = [float(learned.passed[0, index]) for learned in learning]
        reached = [math.nan if step < 0 else step for step in steps]
        rows.append((f"step at which {_hops(hops)} reached 0.9", reached, "", "" if index else paper.order))
    for gamma in runs[0].purity.gammas:
        for kind in PURE:
            for ever in (False, True):
                pure = [figures.purity.pure(kind, gamma, ever=ever) for figures in runs]
                said = "" if ever else heads_text([(layer, 0) for layer in paper.pure[gamma][kind]])
                name = f"{kind} heads {'ever' if ever else 'now'}, γ = {gamma:g}"
                rows.append((name, [len(heads) for heads in pure], "; ".join(map(heads_text, pure)), said))
    names, values, details, papers = zip(*rows, strict=True)
    means = [interval_of_known(row) for row in values]
    columns = {"quantity": names, "mean over seeds": means, "count: layers, by seed": details, "paper": papers}
    return _table(f"{task} task", columns)


def _entropy(task: str, runs: Runs) -> Parts:
    entropy, layers = _by_layer(runs, "entropy"), _layers(runs)
    trace = _heatmap(runs[0].records.steps.tolist(), layers, entropy.mean(0).T, title="nats")
    table = _table(f"{task} task, last record", {"layer": layers, "entropy": entropy[:, -1]})
    return [_chart(f"{task} task", "training step", "layer", [trace], yaxis=_CATEGORIES)], [table]


def _frequencies(task: str, runs: Runs) -> Parts:
    use = torch.stack([figures.records["use"][-1] for figures in runs]).mean(2)  # (seeds, layers, planes)
    if not use.shape[-1]:
        return [], []
    layers, paper = _layers(runs), PAPER[task]
    without = [frequency_ids(figures.run, unscaled_use(figures.run))[-1] for figures in runs]
    columns: dict[str, Column] = {
        "softmax weights": torch.stack([frequency_ids(figures.run)[-1] for figures in runs]).nanmean(2),
        "paper, softmax weights": paper.frequency_ids,
        "softmax weights, without 1/√d": torch.stack(without).nanmean(2),
        "linear weights": _by_layer(runs, "mean_frequency")[:, -1],
        "paper, linear weights": paper.linear_ids,
    }
    relative = use.mean(0) / use.mean(0).amax(1, keepdim=True)
    trace = _heatmap(list(range(1, use.shape[-1] + 1)), layers, relative, title="share of the layer's largest")
    charts = [
        _chart(f"{task} task: mean frequency ID", "layer", "mean frequency ID", _lines(layers, columns)),
        _chart(f"{task} task: use of planes", "frequency ID", "layer", [trace], yaxis=_CATEGORIES),
    ]
    peaks: dict[str, Column] = {
        "largest plane, logits": use.amax(2),
        "without 1/√d": torch.stack([unscaled_use(figures.run)[-1] for figures in runs]).mean(2).amax(2),
        "paper, largest plane": paper.peaks,
    }
    return charts, [_table(f"{task} task: mean frequency ID", {"layer": layers, **columns, **peaks})]


def _geometry(task: str, runs: Runs) -> Parts:
    geometries = [figures.geometry for figures in runs if figures.geometry]
    if not geometries:
        return [], []
    layers, labels = _layers(runs), geometries[0]["query_labels"].tolist()
    pure = Counter(
        layer for figures in runs for layer, _ in set(figures.purity.pure("positional", figures.purity.gammas[0]))
    )
    index_layers = [layer for layer, seeds in pure.items() if 2 * seeds >= len(runs)] or [3]
    charts = []
    for layer in layers[: max(index_layers) + 1]:
        traces = []
        for name, marker in (
            ("queries", {"color": labels, "colorscale": SCALE, "colorbar": {"title": {"text": "integer"}}}),
            ("keys", {"symbol": "x-thin-open", "color": "#D55E00"}),
        ):
            x, y = geometries[0][name][layer, 0].T.tolist()
            traces.append({"x": _rounded(x), "y": _rounded(y), "mode": "markers", "name": name, "marker": marker})
        plane = int(geometries[0]["planes"][layer, 0]) + 1
        title = f"{task} task, seed {runs[0].run.seed}, layer {layer}: plane ID {plane}"
        charts.append(_chart(title, "", "", traces, yaxis={"scaleanchor": "x"}, showlegend=False))
    ids = [f"ID {plane}" for plane in range(1, runs[0].records["use"].shape[-1] + 1)]
    columns: dict[str, Column] = {
        "layer": layers,
        "dominant plane": _votes([geometry["planes"] for geometry in geometries], ids),
    }
    for name in ("shares", "key_resultant", "query_spread", "query_tightness"):
        columns[name.replace("_", " ")] = torch.stack([geometry[name] for geometry in geometries]).nanmean(2)
    return charts, [_table(f"{task} task", columns)]


def _flow(task: str, runs: Runs) -> Parts:
    layers = _layers(runs)
    columns: dict[str, Column] = {"layer": layers}
    title = f"{task} task: solved {_text(interval_of_known([float(figures.flow['solved']) for figures in runs]))}"
    solved = [figures for figures in runs if "path" in figures.flow]
    if not solved:
        return [], [_table(title, columns)]
    path, pattern = solved[0].flow["path"].tolist(), solved[0].flow["pattern"].amax(1)  # (layers, n, n)
    names = ["query", *(f"hop {index}" for index in range(1, len(path) - 1)), "answer"]
    pairs = [(a, b) for a in range(len(path) - 1) for b in range(a, len(path))]
    labels = [f"{names[a]} → {'itself' if a == b else names[b]}" for a, b in pairs]
    weights = torch.stack([pattern[:, path[a], path[b]] for a, b in pairs])
    trace = {**_heatmap(layers, labels, weights, title="attention weight"), "zmin": 0, "zmax": 1}
    on_next = torch.stack([figures.flow["on_next"] for figures in solved]).amax(2)  # (seeds, layers, hops)
    curves = {f"{_hops(hop + 1)} left": on_next[..., hop] for hop in range(on_next.shape[-1])}
    seen = f"{task} task, seed {solved[0].run.seed}: path through positions {' → '.join(map(str, path))}"
    downwards = {"autorange": "reversed", "automargin": True}
    mean, lines = f"{task} task: to the next hop, mean over solved inputs", _lines(layers, curves, most=1)
    charts = [
        _chart(seen, "layer", "", [trace], xaxis=_CATEGORIES, yaxis=downwards),
        _chart(mean, "layer", "attention weight", lines, unit=True),
    ]
    columns["role, by seed"] = _votes([figures.flow["roles"] for figures in solved], ROLES)
    return charts, [_table(title, columns)]


def _extra(task: str, runs: Runs) -> Parts:
    last, paper = [figures.extra["last"] for figures in runs], PAPER[task].accuracy
    best = [figures.extra["best"] for figures in runs if "best" in figures.extra]
    extra = list(last[0])
    means = {
        f"{name} checkpoint": torch.tensor([[accuracies[added].overall for added in extra] for accuracies in listed])
        for name, listed in (("last", last), ("best", best))
        if listed
    }
    said = [paper.get(added) for added in extra]
    gaps = {
        added: float(mean) - known
        for added, mean, known in zip(extra, means["last checkpoint"].mean(0), said, strict=True)
        if known is not None
    }
    by_seed = ([accuracies[added].shares for added in extra] for accuracies in last)
    shares = torch.stack([torch.stack(by_extra) for by_extra in by_seed])  # (seeds, extra, hops)
    by_hops = {_hops(hops): shares[..., index] for index, hops in enumerate(last[0][extra[0]].hops)}
    curves: dict[str, Column] = {**means, "paper": said}
    x = [max(added, 10) for added in extra]  # 0 at the left edge of a logarithmic axis
    log = {"type": "log", "tickvals": [10, 30, *x[6::4]], "ticktext": ["0", "30", *map(str, x[6::4])]}
    title = f"{task} task, last checkpoint, by number of hops"
    charts = [
        _chart(f"{task} task", "extra tokens", "accuracy", _lines(x, curves, most=1), unit=True, xaxis=log),
        _chart(title, "extra tokens", "accuracy", _lines(x, by_hops, most=1), unit=True, xaxis=log),
    ]
    near = sum(abs(gap) <= 0.05 for gap in gaps.values())
    title = f"{task} task: {near} of {len(gaps)} means of the last checkpoint are within 0.05 of the paper's"
    difference = [f"{gaps[added]:+.3f}" if added in gaps else None for added in extra]
    return charts, [_table(title, {"extra tokens": extra, **curves, "last - paper": difference, **by_hops})]


def _discrepancy() -> Parts:
    lengths = sorted({round(2 ** (power / 4)) for power in range(8, 41)})
    omega = 2 * math.pi / LETTERS
    index: dict[str, Column] = {
        "worst input": [index_discrepancy(n, INDEX_ANGLE, at="worst") for n in lengths],
        "bound": [index_bound(n, INDEX_ANGLE) for n in lengths],
        "best input": [index_discrepancy(n, INDEX_ANGLE) for n in lengths],
    }
    retrieval: dict[str, Column] = {
        "worst input": [retrieval_discrepancy(n, RETRIEVAL_ANGLE, omega, at="worst") for n in lengths],
        "bound": [
            # Of the largest distance: n tokens have distances up to n - 1.
            retrieval_bound(n - 1, RETRIEVAL_ANGLE, omega) if (n - 1) * RETRIEVAL_ANGLE <= omega else None
            for n in lengths
        ],
        "best input": [retrieval_discrepancy(n, RETRIEVAL_ANGLE, omega) for n in lengths],
        "worst input, θ = 0": [retrieval_discrepancy(n, 0.0, omega, at="worst") for n in lengths],
    }
    charts, tables = [], []
    for title, columns, scale in (
        (f"Index, θ = {INDEX_ANGLE}", index, "log"),
        (f"Retrieval, θ = {RETRIEVAL_ANGLE}, {LETTERS} letters", retrieval, "linear"),
    ):
        traces = [
            {"x": lengths, "y": _rounded(values), "name": name, "mode": "lines", "line": line_style(at)}
            for at, (name, values) in enumerate(columns.items())
        ]
        axis = {"type": "log"}
        charts.append(_chart(title, "tokens", "discrepancy", traces, xaxis=axis, yaxis={"type": scale}))
        tables.append(_table(title, {"tokens": lengths[::4], **{key: values[::4] for key, values in columns.items()}}))
    return charts, tables


def _places(task: str, runs: Runs) -> Parts:
    curves = {
        f"{added} extra tokens": torch.stack(
            [figures.places[added]["hits"] / figures.places[added]["counts"] for figures in runs]
        )
        for added in runs[0].places
    }
    places = list(range(runs[0].run.setup.task.slots))
    lines = _lines(places, curves, most=1)
    chart = _chart(f"{task} task", "position in the target window", "accuracy", lines, unit=True)
    return [chart], [_table(f"{task} task", {"position": places, **curves})]


SECTIONS: tuple[tuple[str, str, Callable[[str, Runs], Parts] | None], ...] = (
    (
        "Final scores by layer",
        "Positional and symbolic swap scores at the last token of held-out sequences at the last record. The paper's "
        "s_pos is an upper bound from layer 5 on.",
        _scores,
    ),
    (
        "Learning: accuracy, pure heads and their order",
        "Accuracy on held-out sequences by number of hops; pure heads now (at a record) and ever (at that record or an "
        "earlier one, as the paper counts); and the step from which on heads keep the pure label that they have at the "
        "end. Vertical line: step of the paper's largest accuracy. The paper's layers are those of its final scores; "
        "its text says 0 to 3 are positional. A head that is pure for a while is counted as ever pure.",
        _learning,
    ),
    (
        "Entropy by layer over training",
        "Entropy of the attention weights at the last token in nats, mean over held-out sequences and seeds; 17 equal "
        "weights have 2.83. There are no values of the paper.",
        _entropy,
    ),
    (
        "Frequency use and mean frequency ID of all layers",
        "Use of a plane is its largest absolute logit contribution at the last token, mean over held-out sequences. "
        "The mean ID is weighted by the softmax of use, as in the paper, and by use itself. In the paper, the largest "
        "contribution of symbolic layers is 4 to 9. Its values have the size of dot products before their factor 1/√d, "
        "so the means from such products are shown as well.",
        _frequencies,
    ),
    (
        "Geometry of queries and keys in the dominant plane",
        "Queries (coloured by their integer) and keys (crosses) before rotation, in the plane with the largest logit "
        "contributions, up to the last layer that is purely positional (γ = 0.1) in half of the seeds. In the "
        "paper's Index layers the dominant plane has ID 2, keys have one direction (resultant 1), and the direction of "
        "a query is determined by its integer (tightness 1) and differs between integers (spread 1). Shares: part of "
        "the sum over planes of contributions.",
        _geometry,
    ),
    (
        "Information flow on one solved input",
        "Attention weights of one solved input with the most hops, from each token of the path to itself and to later "
        "tokens of the path, by layer, for the first seed that solves one; beside it the weight on the next hop over "
        "all solved inputs. In the paper, Index or Retrieval heads make one hop each, and later heads attend to the "
        "token itself (Reflexive).",
        _flow,
    ),
    (
        "Accuracy by extra tokens",
        "The same questions after extra tokens, which do not change the answer; 0 is drawn at the left edge. Best: the "
        "first checkpoint with the largest accuracy on held-out sequences, which the authors' script keeps.",
        _extra,
    ),
    (
        "Discrepancy by length",
        "Largest minus second largest logit of the constructed heads, computed exactly with the angles of the paper's "
        "figure, for queries and keys of length 1. Bounds of the paper: min{1 - cos θ, 2π²/n²} for Index, "
        "1 - cos(ω - Dθ) up to a distance D ≤ ω/θ for Retrieval. They hold for the worst input. Below 0 another key "
        "has the largest logit. With θ = 0 Retrieval stays away from 0 at any length.",
        None,
    ),
    (
        "Accuracy by position of the answer",
        "Accuracy of the last checkpoint by position of the answer in the target window; 0 is the farthest from the "
        "query. The paper balances these positions and has no values of accuracy by position.",
        _places,
    ),
)
"""Title and note of each section, and the function that draws it for a task; None for the one without runs."""


def _layers(runs: Runs) -> list[int]:
    return list(range(runs[0].run.setup.model.layers))


def _by_layer(runs: Runs, name: str) -> Tensor:
    """Return a recorded score, mean over the heads of a layer, ``(seeds, records, layers)``."""
    return torch.stack([figures.records[name] for figures in runs]).nanmean(3)


def _votes(codes: Sequence[Tensor], names: Sequence[str]) -> list[str]:
    """Return how often each name occurs over the seeds' codes ``(layers, heads)``, by layer."""
    listed = [Counter(names[code] for code in layer.flatten().tolist()) for layer in torch.stack(list(codes), 1)]
    return [", ".join(f"{name} ({n}/{counts.total()})" for name, n in counts.most_common()) for counts in listed]


def _hops(number: int) -> str:
    return f"{number} hop{'s' * (number > 1)}"


def _chart(title: str, x: str, y: str, traces: list[Part], *, unit: bool = False, **layout: Any) -> Part:
    """Return a chart with titles of its axes; ``unit`` if y goes from 0 to 1."""
    shown: Part = {"legend": LEGEND, **layout}
    shown["xaxis"] = axis(x, **layout.get("xaxis", {}))
    limits = {"range": UNIT} if unit else {}
    shown["yaxis"] = axis(y, **limits, **layout.get("yaxis", {}))
    return {"title": title, "traces": traces, "layout": shown}


def _lines(
    x: Sequence[int], curves: Mapping[str, Column], *, most: float = math.inf, mode: str = "lines+markers"
) -> list[Part]:
    """Return means over seeds with bands; a curve without seeds is the paper's, in the colour of the one before.

    Args:
        x: Positions of the points.
        curves: Curves by name.
        most: Largest possible value, at which bands end; the smallest is 0.
        mode: Plotly's mode of the lines.
    """
    traces: list[Part] = []
    index = -1
    for name, values in curves.items():
        if not len(values):  # the paper has none
            continue
        shared = {"x": list(x), "name": plain(name), "legendgroup": name, "mode": mode}
        if not isinstance(values, Tensor):
            line, marker = {**line_style(index), "dash": "dot"}, {"symbol": "x"}
            traces.append(
                {**shared, "y": _rounded(values[: len(x)]), "mode": "lines+markers", "line": line, "marker": marker}
            )
            continue
        index += 1
        intervals = [None if interval is None else interval.within((0, most)) for interval in _over_seeds(values)]
        low, mean, high = (
            _rounded([getattr(interval, end, None) for interval in intervals]) for end in ("low", "mean", "high")
        )
        traces += band(list(x), low, high, index=index, group=name)
        traces.append({**shared, "y": mean, "line": line_style(index)})
    return traces


def _heatmap(x: Sequence[int], y: Sequence[int | str], z: Tensor, *, title: str) -> Part:
    rows = [_rounded(row) for row in z.tolist()]
    bar = {"title": {"text": plain(title), "side": "right"}}
    return {"type": "heatmap", "x": list(x), "y": list(y), "z": rows, "colorscale": SCALE, "colorbar": bar}


def _table(title: str, columns: Mapping[str, Column]) -> Part:
    """Return a table with as many rows as the first column has; shorter columns end with empty cells."""
    cells = [[_text(value) for value in (_over_seeds(x) if isinstance(x, Tensor) else x)] for x in columns.values()]
    rows = [[column[row] if row < len(column) else "" for column in cells] for row in range(len(cells[0]))]
    return {"title": title, "header": list(columns), "rows": rows}


def _over_seeds(values: Tensor) -> list[Interval | None]:
    """Return mean and interval over seeds of each column of ``(seeds, columns)``; None where all are NaN."""
    return [interval_of_known(column) for column in values.double().T.tolist()]


def _text(value: Interval | float | str | None) -> str:
    if isinstance(value, Interval):
        return in_words(value)
    return value if isinstance(value, str) else "–" if value is None else f"{value:,.4g}"


def _rounded(values: Any) -> list[float | None]:
    return [rounded(value) for value in values]
