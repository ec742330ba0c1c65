"""Loss by position, retrieval and attention statistics of texts under every length method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.lengths import METHODS, find_method
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.windows import Untouched
from wherewhat.measures.axes.fit import AxesFit, fit_margins
from wherewhat.measures.axes.margins import blocked_margins
from wherewhat.measures.axes.solver import Band
from wherewhat.measures.batches import chunks, edited_rows, equal_runs, read_at_once, rows_at_once
from wherewhat.measures.extend import LADDER, ExtendConfig
from wherewhat.measures.extend.retrieval import Encode, Questions, ask, plant, run_scores, second_copy
from wherewhat.measures.measurement import Subject
from wherewhat.measures.tensors import centred_ranks, cosine, text_losses
from wherewhat.numerics import constant_tensor
from wherewhat.scores import Column, Scores, on_cpu

SINKS = 4
"""First keys that count as attention sink."""
_BLOCKS, _ROWS = 8, 16
"""Number of groups of queries that are measured, evenly spread, and queries per group."""
_STRETCH = 256
"""Largest side of the triangle of logits whose axes are fitted."""
_Heads = dict[int, dict[str, Tensor]]
"""Values ``(texts · heads,)`` by layer and name."""


def measure_lengths(subject: Subject, ids: Tensor, config: ExtendConfig, *, encode: Encode | None = None) -> Scores:
    """Return the scores of one text ``(1, n)``; see :func:`measure_all_lengths`."""
    return measure_all_lengths(subject, ids, config, encode=encode)[0]


def measure_all_lengths(
    subject: Subject, ids: Tensor, config: ExtendConfig, *, encode: Encode | None = None
) -> list[Scores]:
    """Return losses, gains from planted sequences, attention and its outputs beyond the trained length, per method.

    Tokens and tokenizer are those of :class:`LengthProbes`; there are scores of each text.
    """
    trained = config.trained or subject.trained_length()
    plan = config.loaded_plan()
    if plan is not None:
        subject.check_plan(plan)
    methods = [config.method(name, trained=trained, length=ids.shape[1], plan=plan) for name in config.methods]
    probes = LengthProbes(subject, ids, config, methods, encode=encode)
    by_method = probes.measure(methods)
    return [
        _joined(controls, {method.name: scores[text] for method, scores in zip(methods, by_method, strict=True)})
        for text, controls in enumerate(probes.controls)
    ]


def _joined(controls: Scores, by_method: Mapping[str, Scores]) -> Scores:
    """Return the scores of one text, those of a method under the method's name."""
    whole = dict(controls.whole)
    heads = {layer.layer: dict(layer.heads) for layer in controls.layers}
    curves: dict[str, Column] = {}
    for method, scores in by_method.items():
        whole |= {f"{name}_{method}": value for name, value in scores.whole.items()}
        curves |= {f"{name}_{method}": curve for name, curve in scores.curves.items()}
        for layer in scores.layers:
            heads[layer.layer] |= {f"{name}_{method}": x for name, x in layer.heads.items()}
    shifts = [
        float(torch.cat([values[f"output_shift_{name}"] for values in heads.values()]).mean()) for name in by_method
    ]
    ranked = rank_correlation(torch.tensor(shifts), torch.tensor([whole[f"loss_beyond_{name}"] for name in by_method]))
    if math.isfinite(ranked):
        whole["rank_shift_loss"] = ranked
    return Scores(
        layers=[Scores(layer=layer, heads=heads[layer]) for layer in sorted(heads)], whole=whole, curves=curves
    )


class LengthProbes:
    """Measures length methods on texts of one length; the controls, which all methods share, are measured once.

    Losses beyond are compared with those of the same tokens read in pieces of the trained length; planted sequences
    with the text without them; attention and its outputs with those of the unmodified model in the second half of the
    trained length, per layer and head. The control for outputs is the same tokens in pieces, without a change of
    length. Each method reads a text twice: intact and planted. With ``config.retrieval`` it also reads a text with a
    second copy of its beginning, and one with facts and questions. Texts and methods are rows of one batch, as many at
    a time as memory allows.

    Args:
        subject: The model.
        ids: Tokens, ``(texts, n)``, more of them than the trained length.
        config: Options; its methods are not used.
        methods: Methods that will be measured.
        encode: The tokenizer, for the pass key and the codes; without it they are left out.

    Attributes:
        controls: Controls of each text.
    """

    def __init__(
        self,
        subject: Subject,
        ids: Tensor,
        config: ExtendConfig,
        methods: Sequence[LengthMethod],
        *,
        encode: Encode | None = None,
    ) -> None:
        self._ids, n = ids, ids.shape[1]
        self._subject, self._depths = subject, config.depths
        self._trained = trained = config.trained or subject.trained_length()
        if n <= trained + 1:
            raise MeasureError(
                f"{n} tokens are not beyond the {trained} the model was trained on: use more with --tokens and "
                "--beyond, or a smaller value of trained"
            )
        for method in methods:
            method.check(n)
        short = ids[:, :trained]
        ends = torch.cat([ids[:, :1], ids[:, n - trained + 1 :]], 1)
        pieces = [plant(text[None], config.depths, run=config.run) for text in ends]
        self._plantings = [plant(text[None], config.depths, run=config.run) for text in ids]
        # At a distance of exactly the trained length, the token after the first copy would still be inside a window.
        apart = min(trained + trained // 8, n - 2)
        self._copy = second_copy(ids, trained=trained, distance=apart) if config.retrieval else None
        if not config.retrieval:
            encode = None
        self._questions = [] if encode is None else [ask(text[None], encode, trained=trained) for text in ids]
        self._outputs, inside, losses = _inside(subject, short, methods, logits=config.retrieval)
        shifts = {layer: ShiftSums(reference) for layer, reference in self._outputs.items()}

        def add_outputs(attention: LayerAttention) -> None:
            shifts[attention.layer].add(merged_outputs(attention.output[:, trained // 2 :], len(ids)))

        self._pieces, self._most = read_in_pieces(subject, ids, trained, add_outputs)

        def unmodified(rows: Tensor, read: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
            """Return numbers of each row without a method, from its logits ``(n, vocabulary)`` and its index."""

            def numbers(logits: Tensor, chunk: slice) -> list[Tensor]:
                return [read(row, index) for row, index in zip(logits, range(chunk.start, chunk.stop), strict=True)]

            return edited_rows(subject.edited, rows, lambda *_: None, numbers, most=self._most(rows.shape[1]))

        both = torch.cat([planting.planted for planting in pieces] + [planting.control for planting in pieces])
        runs = torch.stack(unmodified(both, lambda row, index: run_scores(pieces[index % len(ids)], row)))
        found = runs[: len(ids)] - runs[len(ids) :]  # (texts, 2, depths)
        wholes: list[dict[str, float]] = [
            {
                "trained_length": float(trained),
                "text_length": float(n),
                "loss_pieces": float(self._pieces[text, trained:].mean()),
                "found_pieces": float(found[text, 0].mean()),
            }
            | {f"distance_{depth}": float(x) for depth, x in zip(config.depths, planting.distances, strict=True)}
            for text, planting in enumerate(self._plantings)
        ]
        if self._copy is not None and losses is not None:
            half = trained // 2
            self._once = torch.cat([losses[:, :half], self._pieces[:, half:]], 1)
            again = second_copy(short, trained=trained)
            losses_again = unmodified(again.ids, lambda row, index: text_losses(row[None], again.ids[index, None])[0])
            for whole, once, own in zip(wholes, self._once, losses_again, strict=True):
                whole["second_copy_pieces"] = again.difference(own, once)
                whole["second_copy_distance"] = float(self._copy.distance)
        if encode is not None:
            for suffix, stated in (("pieces", True), ("chance", False)):
                asked = [ask(text[None], encode, trained=trained, stated=stated) for text in short]
                rows = torch.cat([questions.ids for questions in asked])
                answers = unmodified(rows, lambda row, index, asked=asked: asked[index].answer_scores(row))  # type: ignore[misc]
                for whole, own in zip(wholes, answers, strict=True):
                    whole |= {f"{name}_{suffix}": value for name, value in Questions.summary(own).items()}
            for whole, questions in zip(wholes, self._questions, strict=True):
                whole["answers_distance"] = float(questions.distance)
        heads = {
            layer: {f"{name}_inside": x for name, x in statistics.items()}
            | {f"{name}_pieces": x for name, x in shifts[layer].result().items()}
            for layer, statistics in inside.items()
        }
        self.controls = [
            replace(scores, whole=whole) for scores, whole in zip(_by_text(heads, len(ids)), wholes, strict=True)
        ]

    def measure(self, methods: Sequence[LengthMethod]) -> list[list[Scores]]:
        """Return the scores of each text under each method, by metric without the method's name."""
        count, plantings = len(self._ids), self._plantings
        kinds = {"control": self._ids, "planted": torch.cat([planting.planted for planting in plantings])}
        if self._copy is not None:
            kinds["copy"] = self._copy.ids
        if self._questions:
            kinds["questions"] = torch.cat([questions.ids for questions in self._questions])
        rows = [_Row(method, kind, text) for method in range(len(methods)) for kind in kinds for text in range(count)]
        heads: list[dict[int, list[dict[str, Tensor]]]] = [{} for _ in methods]

        def edit(attention: LayerAttention, chunk: slice) -> Tensor | None:
            outputs: list[tuple[LayerAttention, Tensor | None]] = []
            for method, own in equal_runs([row.method for row in rows[chunk]]):
                part = attention.selected(own)
                output = methods[method].attend(part)
                observed = [row for row in rows[chunk][own] if row.kind == "control"]  # the first of these rows
                if observed:
                    control = part.selected(slice(0, len(observed)))
                    texts = slice(observed[0].text, observed[-1].text + 1)
                    seen = control.output if output is None else output[: len(observed)]
                    probed = self._observe(control, seen, methods[method], texts)
                    heads[method].setdefault(attention.layer, []).append(probed)
                outputs.append((part, output))
            if all(output is None for _, output in outputs):
                return None
            if len(outputs) == 1:
                return outputs[0][1]
            return torch.cat([part.output if output is None else output for part, output in outputs])

        def read(logits: Tensor, chunk: slice) -> list[Tensor]:
            return [self._read(row, own) for row, own in zip(rows[chunk], logits, strict=True)]

        ids = torch.cat([*kinds.values()] * len(methods))
        numbers = edited_rows(self._subject.edited, ids, edit, read, most=self._most(ids.shape[1]))
        by_row = dict(zip(rows, numbers, strict=True))
        measured = []
        for method, layers in enumerate(heads):
            of_layers = {
                layer: {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
                for layer, parts in layers.items()
            }
            measured.append(
                [
                    self._scores(scores, {kind: by_row[_Row(method, kind, text)] for kind in kinds}, text)
                    for text, scores in enumerate(_by_text(of_layers, count))
                ]
            )
        return measured

    def _observe(
        self, attention: LayerAttention, output: Tensor, method: LengthMethod, texts: slice
    ) -> dict[str, Tensor]:
        """Return values ``(texts · heads,)`` of one layer on some intact texts under a method."""
        beyond = slice(self._trained, attention.n)
        sums = ShiftSums(self._outputs[attention.layer].selected(texts, attention.heads))
        sums.add(merged_outputs(output[:, beyond], attention.texts))
        return sums.result() | attention_probe(attention, method, beyond, limit=self._trained)

    def _read(self, row: _Row, logits: Tensor) -> Tensor:
        """Return what is needed of the logits ``(n, vocabulary)`` of one row, ``(numbers,)`` float64."""
        if row.kind == "questions":
            return self._questions[row.text].answer_scores(logits)
        if row.kind == "copy":
            assert self._copy is not None
            return text_losses(logits[None], self._copy.ids[row.text, None])[0]
        runs = run_scores(self._plantings[row.text], logits)
        if row.kind == "planted":
            return runs
        return torch.cat([text_losses(logits[None], self._ids[row.text, None])[0], runs.flatten()])

    def _scores(self, layers: Scores, numbers: Mapping[str, Tensor], text: int) -> Scores:
        """Return the scores of one text under one method, from those of its layers and the numbers of its rows."""
        planting, trained, n = self._plantings[text], self._trained, self._ids.shape[1]
        losses = numbers["control"][: n - 1]
        gain, exact = numbers["planted"] - numbers["control"][n - 1 :].view(2, -1)
        rise = losses - self._pieces[text]
        half = slice(trained // 2, trained)
        whole = {
            "loss_inside": float(losses[half].mean()),
            "loss_beyond": float(losses[trained:].mean()),
            "loss_rise": float(rise[trained:].mean()),
            "rise_inside": float(rise[half].mean()),
        }
        whole |= {f"rise_to_{multiple:g}x": value for multiple, value in by_multiple(rise, trained).items()}
        far = planting.distances >= trained
        for name, depths in (("found_within", ~far), ("found_beyond", far)):
            whole[name] = float(gain[depths].mean())
        for index, depth in enumerate(self._depths):
            whole |= {f"found_{depth}": float(gain[index]), f"exact_{depth}": float(exact[index])}
        if self._copy is not None:
            whole["second_copy"] = self._copy.difference(numbers["copy"], self._once[text])
        if self._questions:
            whole |= Questions.summary(numbers["questions"])
        curves = {
            "loss_by_position": Column(buckets(losses, trained), ("bucket", "position and loss")),
            "rise_by_position": Column(buckets(rise, trained, first=half.start), ("bucket", "position and rise")),
        }
        defined = {name: x for name, x in whole.items() if math.isfinite(x)}
        return replace(layers, whole=defined, curves=curves)


class _Row(NamedTuple):
    """One row of a batch: a method by index, what is read, and the text by index."""

    method: int
    kind: str
    text: int


def _by_text(heads: _Heads, texts: int) -> list[Scores]:
    """Return scores of each text from values ``(texts · heads,)`` of layers, read from the device at once."""
    split = {
        layer: {name: torch.unflatten(x, 0, (texts, -1)) for name, x in values.items()}
        for layer, values in heads.items()
    }
    return on_cpu(
        [
            Scores(
                layers=[
                    Scores(layer=layer, heads={name: x[text] for name, x in values.items()})
                    for layer, values in split.items()
                ]
            )
            for text in range(texts)
        ]
    )


def merged_outputs(output: Tensor, texts: int) -> Tensor:
    """Return outputs ``(pieces · texts, n, heads, d)`` as ``(pieces · n, texts · heads, d)``."""
    pieces = torch.unflatten(output, 0, (-1, texts))
    return pieces.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _inside(
    subject: Subject, ids: Tensor, methods: Sequence[LengthMethod], *, logits: bool
) -> tuple[dict[int, Reference], _Heads, Tensor | None]:
    """Return attention of the unmodified model in the second half of the trained length ``(texts, n)``.

    Returns:
        Distributions of attention outputs by layer, attention statistics, and losses ``(texts, n - 1)`` of the whole
        trained length by the index they are predicted from, if asked for.
    """
    n = ids.shape[1]
    queries = slice(n // 2, n)
    outputs: dict[int, Reference] = {}
    heads: _Heads = {}
    rotating = []

    def measure(attention: LayerAttention) -> None:
        rotating.append(attention.rotation is not None)
        outputs[attention.layer] = Reference.of(merged_outputs(attention.output[:, queries], len(ids)))
        heads[attention.layer] = attention_probe(attention, Untouched(), queries, limit=n // 2)

    predictions = subject.run(ids, measure, logits=logits)
    rotary = [method.name for method in methods if method.rotary]
    if rotary and not any(rotating):
        raise MeasureError(
            f"{rotary[0]} changes distances, and no layer of this model rotates its queries and keys: choose from "
            + ", ".join(name for name in METHODS if not find_method(name).rotary)
        )
    return outputs, heads, None if predictions is None else text_losses(predictions, ids).cpu()


def read_in_pieces(
    subject: Subject, ids: Tensor, trained: int, reducer: Callable[[LayerAttention], None] = lambda _: None
) -> tuple[Tensor, Callable[[int], int]]:
    """Return the loss of each token of texts if the unmodified model reads at most the trained length at a time.

    Pieces of that length overlap by half, and the second half of each is used: every token has at least half a trained
    length before it. Each piece begins with the text's first token, which is often an attention sink. ``reducer`` is
    called with each layer of the pieces after the first, whose second half is the text beyond; pieces of one length
    are rows of a batch, with all texts of a piece next to each other.

    Returns:
        Loss by the index it is predicted from, ``(texts, n - 1)``; NaN in the first half of the first piece. And the
        number of rows that can be run at once, by their tokens.
    """
    (texts, n), half = ids.shape, trained // 2
    stops = {start: min(n - 1, start + trained) for start in range(0, n - 1 - half, trained - half)}
    parts: dict[int, Tensor] = {}

    def read(starts: Sequence[int], reducer: Callable[[LayerAttention], None]) -> Tensor:
        pieces = [torch.cat([ids[:, :1], ids[:, start + 1 : stops[start] + 1]], 1) for start in starts]
        logits = subject.run(torch.cat([piece[:, :-1] for piece in pieces]), reducer, logits=True)
        assert logits is not None
        losses = text_losses(logits, torch.cat(pieces))[:, half:]
        parts.update(zip(starts, torch.split(losses, texts), strict=True))
        return logits[:1, :1].clone()

    first, *others = stops
    sample = read([first], lambda _: None)
    for _, same in itertools.groupby(others, lambda start: stops[start] - start):
        alike = list(same)
        most = max(1, rows_at_once(sample, tokens=trained) // texts)
        for some in chunks(len(alike), most):
            read(alike[some], reducer)
    losses = torch.full((texts, n - 1), torch.nan, dtype=torch.float64)
    for start, part in zip(parts, read_at_once([*parts.values()]), strict=True):
        losses[:, start + half : stops[start]] = part
    return losses, lambda tokens: rows_at_once(sample, tokens=tokens)


def by_multiple(rise: Tensor, trained: int) -> dict[float, float]:
    """Return the mean of ``rise`` ``(n - 1,)`` on each step of the ladder that the text reaches."""
    steps = {
        multiple: slice(round(before * trained), round(multiple * trained))
        for before, multiple in itertools.pairwise((1.0, *LADDER))
    }
    return {multiple: float(rise[step].mean()) for multiple, step in steps.items() if step.start < len(rise)}


def buckets(values: Tensor, trained: int, *, first: int = 0) -> Tensor:
    """Return mean position and value of each quarter of a trained length from ``first`` on, ``(buckets, 2)``."""
    size = max(1, trained // 4)
    rows = [
        (float(i + min(size, len(values) - i) / 2), float(values[i : i + size].mean()))
        for i in range(first, len(values), size)
    ]
    return torch.tensor(rows)


_ENTRIES = {"cpu": 2**22, "cuda": 2**28}
"""Logits of a probe that are computed at a time: limited by caches on a CPU, by memory on a GPU."""


def attention_probe(attention: LayerAttention, method: LengthMethod, queries: slice, limit: int) -> dict[str, Tensor]:
    """Return attention statistics of one layer under a method, from some of its queries.

    Args:
        attention: One layer.
        method: The method.
        queries: Queries to sample from.
        limit: Distance from which keys count as far.

    Returns:
        Values ``(texts · heads,)`` by name, NaN where undefined: ``entropy`` and ``sink_mass`` of the weights;
        ``far_mass``, the weight on far keys without the sink; ``far_logit``, the largest excess over queries of the
        largest logit of far keys over that of near ones; ``axes_r`` and ``axes_distance``, the correlation of logits
        with their three axes and the share of variance that distance alone explains, in the last part of the queries.
    """
    if attention.n <= SINKS:
        raise MeasureError(f"a text of {attention.n} tokens has no queries after the first {SINKS}: give a longer one")
    rows = tuple(row for group in sample_queries(queries) for row in range(group.start, group.stop))
    most = _ENTRIES.get(attention.rot_q.device.type, 2**24) // (attention.heads * attention.m * _STRETCH)
    parts = []
    for texts in chunks(attention.texts, max(1, most)):
        part = attention.selected(texts)
        parts.append(_spread(part, method, rows, limit) | axes_probe(part, method, queries))
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _spread(attention: LayerAttention, method: LengthMethod, rows: tuple[int, ...], limit: int) -> dict[str, Tensor]:
    """Return the statistics of :func:`attention_probe` that are means and maxima over queries."""
    scores = method.scores(attention, rows)  # (texts, heads, rows, m)
    i = constant_tensor(rows, scores.device)
    weights = attention.weigh(scores, i)
    nats = torch.special.entr(weights).sum(-1)
    if attention.sinks is not None:
        nats = nats + torch.special.entr((1 - weights.sum(-1)).clamp_min(0))
    choice = (scores.isfinite().any(1).sum(-1) >= 2)[:, None]  # queries that see at least two keys, (texts, 1, rows)
    late = i >= SINKS
    distance = i[:, None] - torch.arange(attention.m, device=i.device)
    near = distance < limit
    far = ~near
    far[:, :SINKS] = False
    best = (scores.masked_fill(~x, -torch.inf).amax(-1) for x in (far, near))
    margin = torch.sub(*best).nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(-1).double()
    by_head = {
        "entropy": torch.where(choice, nats, 0.0).double().sum(-1) / choice.sum(-1).clamp_min(1),
        "sink_mass": (weights[..., :SINKS].sum(-1) * late).double().sum(-1) / sum(row >= SINKS for row in rows),
        "far_mass": (weights * far).sum(-1).double().sum(-1) / len(rows),
        "far_logit": torch.where(margin.isfinite(), margin, torch.nan),
    }
    return {name: x.flatten() for name, x in by_head.items()}


def axes_probe(attention: LayerAttention, method: LengthMethod, queries: slice) -> dict[str, Tensor]:
    """Return ``axes_r`` and ``axes_distance`` ``(texts · heads,)`` of the logits in the last part of the queries."""
    side = min(_STRETCH, queries.stop - queries.start)
    rows = slice(queries.stop - side, queries.stop)
    logits = method.scores(attention, rows)[..., rows].double()  # (texts, heads, side, side)
    shown = logits.isfinite()
    i = torch.arange(side, device=logits.device)
    distance = i[:, None] - i
    # The fit is over the distances at which every query of every head sees its key.
    hidden = ~shown.all(1) & (distance >= 0)
    widths: list[int] = torch.where(hidden, distance, side).amin((-1, -2)).tolist()
    logits = logits.masked_fill_(~shown, 0.0)
    fits = torch.full((2, *logits.shape[:2]), torch.nan, dtype=torch.float64, device=logits.device)
    for width in sorted(set(widths)):
        if width < 3 or side < 4:
            continue
        texts = [text for text, own in enumerate(widths) if own == width]
        chosen = logits if len(texts) == len(widths) else logits[texts]
        fit = _fit_logits(chosen.flatten(0, 1), Band(side, width, logits.device))
        fits[:, texts] = torch.unflatten(torch.stack([fit.r, fit.unique["a"]]), 1, (len(texts), -1))
    return {"axes_r": fits[0].flatten(), "axes_distance": fits[1].flatten()}


def _fit_logits(logits: Tensor, band: Band) -> AxesFit:
    """Fit three axes to logits ``(heads, n, n)`` float64 on a band."""
    margins = blocked_margins(lambda i0, i1, j0, j1: logits[:, i0:i1, j0:j1].clone(), len(logits), band, block=band.n)
    return fit_margins(margins, torch.zeros_like(margins.sums), method="blocked")


def sample_queries(queries: slice) -> Iterator[slice]:
    """Yield up to 8 groups of up to 16 queries, evenly spread over ``queries`` with the last at its end."""
    length = queries.stop - queries.start
    rows = min(_ROWS, max(1, length // _BLOCKS))
    count = min(_BLOCKS, length // rows)
    for group in range(1, count + 1):
        stop = queries.start + round(length * group / count)
        yield slice(stop - rows, stop)


@dataclass(frozen=True)
class Reference:
    """Distribution of the attention outputs of one layer at positions within the trained length.

    Attributes:
        mean: Mean output, ``(heads, d)`` float64.
        covariance: Their covariance, ``(heads, d, d)``.
        spread: Root of its trace, ``(heads,)``: the size of deviations from the mean.
        far: 99 % quantile of the deviations, ``(heads,)``.
    """

    mean: Tensor
    covariance: Tensor
    spread: Tensor
    far: Tensor

    @classmethod
    def of(cls, output: Tensor) -> Reference:
        """Return the distribution of outputs ``(n, heads, d)``."""
        x = output.double().transpose(0, 1)  # (heads, n, d)
        mean = x.mean(1)
        centred = x - mean[:, None]
        covariance = centred.mT @ centred / x.shape[1]
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        return cls(mean, covariance, spread, centred.norm(dim=-1).quantile(0.99, dim=-1))

    def selected(self, texts: slice, heads: int) -> Reference:
        """Return the part of some texts, if there are ``heads`` heads of each text."""
        own = slice(texts.start * heads, texts.stop * heads)
        return Reference(self.mean[own], self.covariance[own], self.spread[own], self.far[own])


class ShiftSums:
    """Accumulate the shift of attention outputs from a reference over parts of the outputs.

    For finite samples of the same distribution the shift differs from the limit of infinite samples (0, 0 and 0.01):
    compare it with that of as many outputs that have not shifted, relative to the same reference.
    """

    def __init__(self, reference: Reference) -> None:
        """Start with no outputs."""
        self._reference = reference
        self._count = 0
        self._sums = torch.zeros_like(reference.mean)
        self._products = torch.zeros_like(reference.covariance)
        self._outliers = torch.zeros_like(reference.far)

    def add(self, output: Tensor) -> None:
        """Add outputs ``(n, heads, d)``."""
        away = output.double().transpose(0, 1) - self._reference.mean[:, None]  # (heads, n, d)
        self._count += away.shape[1]
        self._sums += away.sum(1)
        self._products += away.mT @ away
        self._outliers += (away.norm(dim=-1) > self._reference.far[:, None]).sum(-1)

    def result(self) -> dict[str, Tensor]:
        """Return the shift of all outputs by metric, each ``(heads,)``.

        ``output_shift`` is the distance of the means in units of the reference's spread, ``output_covariance`` the
        distance of the covariances (Frobenius) relative to the reference's size, ``output_outliers`` the share of
        outputs farther from the reference's mean than 99 % of its own.
        """
        reference = self._reference
        moved = self._sums / self._count
        covariance = self._products / self._count - moved[:, :, None] * moved[:, None]
        size = reference.covariance.norm(dim=(-1, -2)).clamp_min(1e-300)
        return {
            "output_shift": moved.norm(dim=-1) / reference.spread.clamp_min(1e-300),
            "output_covariance": (covariance - reference.covariance).norm(dim=(-1, -2)) / size,
            "output_outliers": self._outliers / self._count,
        }


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan
