"""Loss by position, retrieval and attention statistics of one text under every length method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.lengths import METHODS, find_method
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.windows import Untouched
from wherewhat.measures.attention import SpreadSums, WeightBlock
from wherewhat.measures.axes.fit import fit_margins
from wherewhat.measures.axes.margins import blocked_margins
from wherewhat.measures.axes.solver import Band
from wherewhat.measures.extend import LADDER, ExtendConfig
from wherewhat.measures.extend.retrieval import Encode, ask, plant, planted_gain, second_copy
from wherewhat.measures.measurement import Subject
from wherewhat.measures.tensors import centred_ranks, cosine, token_losses
from wherewhat.scores import Column, Scores

SINKS = 4
"""First keys that count as attention sink."""
_BLOCKS, _ROWS = 8, 16
"""Number of groups of queries that are measured, evenly spread, and queries per group."""
_STRETCH = 256
"""Largest side of the triangle of logits whose axes are fitted."""
_Heads = dict[int, dict[str, Tensor]]
"""Values per head by layer and name."""


def measure_lengths(subject: Subject, ids: Tensor, config: ExtendConfig, *, encode: Encode | None = None) -> Scores:
    """Return losses, gains from planted sequences, attention and its outputs beyond the trained length, per method.

    Tokens and tokenizer are those of :class:`LengthProbes`.
    """
    trained = config.trained or subject.trained_length()
    plan = config.loaded_plan()
    if plan is not None:
        subject.check_plan(plan)
    methods = [config.method(name, trained=trained, length=ids.shape[1], plan=plan) for name in config.methods]
    probes = LengthProbes(subject, ids, config, methods, encode=encode)
    whole, heads = probes.whole, probes.heads
    curves: dict[str, Column] = {}
    for method in methods:
        scores = probes.measure(method)
        whole |= {f"{name}_{method.name}": value for name, value in scores.whole.items()}
        curves |= {f"{name}_{method.name}": curve for name, curve in scores.curves.items()}
        for layer in scores.layers:
            heads[layer.layer] |= {f"{name}_{method.name}": x for name, x in layer.heads.items()}
    shifts = [
        float(torch.cat([values[f"output_shift_{name}"] for values in heads.values()]).mean())
        for name in config.methods
    ]
    ranked = rank_correlation(
        torch.tensor(shifts), torch.tensor([whole[f"loss_beyond_{name}"] for name in config.methods])
    )
    if math.isfinite(ranked):
        whole["rank_shift_loss"] = ranked
    return Scores(
        layers=[Scores(layer=layer, heads=heads[layer]) for layer in sorted(heads)], whole=whole, curves=curves
    )


class LengthProbes:
    """Measures length methods on one text; the controls, which all methods share, are measured once.

    Losses beyond are compared with those of the same tokens read in pieces of the trained length; planted sequences
    with the text without them; attention and its outputs with those of the unmodified model in the second half of the
    trained length, per layer and head. The control for outputs is the same tokens in pieces, without a change of
    length. Each method reads the text twice: intact and planted. With ``config.retrieval`` it also reads a text with a
    second copy of its beginning, and one with facts and questions.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``, more of them than the trained length.
        config: Options; its methods are not used.
        methods: Methods that will be measured.
        encode: The tokenizer, for the pass key and the codes; without it they are left out.

    Attributes:
        whole: Controls by metric.
        heads: Controls per head, by layer and metric.
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
        n = ids.shape[1]
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
        piece = plant(torch.cat([ids[:, :1], ids[:, n - trained + 1 :]], 1), config.depths, run=config.run)
        self._planting = plant(ids, config.depths, run=config.run)
        # At a distance of exactly the trained length, the token after the first copy would still be inside a window.
        apart = min(trained + trained // 8, n - 2)
        self._copy = second_copy(ids, trained=trained, distance=apart) if config.retrieval else None
        if not config.retrieval:
            encode = None
        self._questions = None if encode is None else ask(ids, encode, trained=trained)
        self._outputs, inside, losses = _inside(subject, short, methods, logits=config.retrieval)
        in_pieces = {layer: ShiftSums(reference) for layer, reference in self._outputs.items()}
        self._pieces = read_in_pieces(
            subject, ids, trained, lambda attention: in_pieces[attention.layer].add(attention.output[0, trained // 2 :])
        )
        self.whole: dict[str, float] = {
            "trained_length": float(trained),
            "text_length": float(n),
            "loss_pieces": float(self._pieces[trained:].mean()),
            "found_pieces": float(
                planted_gain(piece, *(self._untouched(x) for x in (piece.planted, piece.control))).gain.mean()
            ),
        } | {f"distance_{depth}": float(x) for depth, x in zip(config.depths, self._planting.distances, strict=True)}
        if self._copy is not None and losses is not None:
            half = trained // 2
            self._once = torch.cat([losses[:half], self._pieces[half:]])
            again = second_copy(short, trained=trained)
            losses_again = token_losses(self._untouched(again.ids), again.ids)
            self.whole |= {
                "second_copy_pieces": again.difference(losses_again, self._once),
                "second_copy_distance": float(self._copy.distance),
            }
        if self._questions is not None and encode is not None:
            for suffix, stated in (("pieces", True), ("chance", False)):
                asked = ask(short, encode, trained=trained, stated=stated)
                answers = asked.scores(self._untouched(asked.ids))
                self.whole |= {f"{name}_{suffix}": value for name, value in answers.items()}
            self.whole["answers_distance"] = float(self._questions.distance)
        self.heads: _Heads = {
            layer: {f"{name}_inside": x for name, x in statistics.items()}
            | {f"{name}_pieces": x for name, x in in_pieces[layer].result().items()}
            for layer, statistics in inside.items()
        }

    def _untouched(self, ids: Tensor) -> Tensor:
        return self._subject.edited(ids, Untouched().attend)

    def measure(self, method: LengthMethod) -> Scores:
        """Return the scores of one method, by metric without the method's name."""
        planting, trained, subject = self._planting, self._trained, self._subject
        ids = planting.control
        beyond = slice(trained, ids.shape[1])
        layers = []

        def observe(attention: LayerAttention) -> Tensor | None:
            output = method.attend(attention)
            sums = ShiftSums(self._outputs[attention.layer])
            sums.add((attention.output if output is None else output)[0, beyond])
            heads = sums.result() | attention_probe(attention, method, beyond, limit=trained)
            layers.append(Scores(layer=attention.layer, heads=heads))
            return output

        logits = subject.edited(ids, observe)
        losses = token_losses(logits, ids)
        # Logits of long texts are gigabytes: those that are needed later are copied, and one text's are freed before
        # the next is read.
        end = logits[:, -planting.needed :].clone()
        del logits
        retrieval = planted_gain(planting, subject.edited(planting.planted, method.attend), end)
        rise = losses - self._pieces
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
            whole[name] = float(retrieval.gain[depths].mean())
        for index, depth in enumerate(self._depths):
            whole |= {f"found_{depth}": float(retrieval.gain[index]), f"exact_{depth}": float(retrieval.exact[index])}
        if self._copy is not None:
            losses_again = token_losses(subject.edited(self._copy.ids, method.attend), self._copy.ids)
            whole["second_copy"] = self._copy.difference(losses_again, self._once)
        if self._questions is not None:
            whole |= self._questions.scores(subject.edited(self._questions.ids, method.attend))
        curves = {
            "loss_by_position": Column(buckets(losses, trained), ("bucket", "position and loss")),
            "rise_by_position": Column(buckets(rise, trained, first=half.start), ("bucket", "position and rise")),
        }
        return Scores(layers=layers, whole={name: x for name, x in whole.items() if math.isfinite(x)}, curves=curves)


def _inside(
    subject: Subject, ids: Tensor, methods: Sequence[LengthMethod], *, logits: bool
) -> tuple[dict[int, Reference], _Heads, Tensor | None]:
    """Return attention of the unmodified model in the second half of the trained length ``(1, n)``.

    Returns:
        Distributions of attention outputs by layer, attention statistics, and losses ``(n - 1,)`` of the whole trained
        length by the index they are predicted from, if asked for.
    """
    n = ids.shape[1]
    queries = slice(n // 2, n)
    outputs: dict[int, Reference] = {}
    heads: _Heads = {}
    rotating = []

    def measure(attention: LayerAttention) -> None:
        rotating.append(attention.rotation is not None)
        outputs[attention.layer] = Reference.of(attention.output[0, queries])
        heads[attention.layer] = attention_probe(attention, Untouched(), queries, limit=n // 2)

    predictions = subject.run(ids, measure, logits=logits)
    rotary = [method.name for method in methods if method.rotary]
    if rotary and not any(rotating):
        raise MeasureError(
            f"{rotary[0]} changes distances, and no layer of this model rotates its queries and keys: choose from "
            + ", ".join(name for name in METHODS if not find_method(name).rotary)
        )
    return outputs, heads, None if predictions is None else token_losses(predictions, ids)


def read_in_pieces(
    subject: Subject, ids: Tensor, trained: int, reducer: Callable[[LayerAttention], None] = lambda _: None
) -> Tensor:
    """Return the loss of each token if the unmodified model reads at most the trained length at a time.

    Pieces of that length overlap by half, and the second half of each is used: every token has at least half a trained
    length before it. Each piece begins with the text's first token, which is often an attention sink. ``reducer`` is
    called with each layer of the pieces after the first, whose second half is the text beyond.

    Returns:
        Loss by the index it is predicted from, ``(n - 1,)``; NaN in the first half of the first piece.
    """
    n, half = ids.shape[1], trained // 2
    losses = torch.full((n - 1,), torch.nan, dtype=torch.float64)
    for start in range(0, n - 1 - half, trained - half):
        stop = min(n - 1, start + trained)
        piece = torch.cat([ids[:, :1], ids[:, start + 1 : stop]], 1)
        logits = subject.run(piece, reducer if start else lambda _: None, logits=True)
        assert logits is not None
        with_target = torch.cat([piece, ids[:, stop : stop + 1]], 1)
        losses[start + half : stop] = token_losses(logits, with_target)[half:]
    return losses


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


def attention_probe(attention: LayerAttention, method: LengthMethod, queries: slice, limit: int) -> dict[str, Tensor]:
    """Return attention statistics of one layer under a method, from some of its queries.

    Args:
        attention: One layer, batch 1.
        method: The method.
        queries: Queries to sample from.
        limit: Distance from which keys count as far.

    Returns:
        Values ``(heads,)`` by name, NaN where undefined: ``entropy`` and ``sink_mass`` of the weights; ``far_mass``,
        the weight on far keys without the sink; ``far_logit``, the largest excess over queries of the largest logit of
        far keys over that of near ones; ``axes_r`` and ``axes_distance``, the correlation of logits with their three
        axes and the share of variance that distance alone explains, in the last part of the queries.
    """
    sums = SpreadSums(attention, SINKS)
    device = attention.rot_q.device
    mass = torch.zeros(attention.heads, dtype=torch.float64, device=device)
    margin = torch.full((attention.heads,), -torch.inf, dtype=torch.float64, device=device)
    j = torch.arange(attention.m, device=device)
    count = 0
    for rows in sample_queries(queries):
        scores = method.scores(attention, rows)
        weights = attention.weigh(scores, rows)[0]
        sums.add(WeightBlock.of(attention, rows, weights, scores[0].isfinite().any(0)))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        far = (i - j >= limit) & (j >= SINKS)
        near = i - j < limit
        mass += (weights * far).sum((-1, -2)).double()
        best = (scores[0].masked_fill(~x, -torch.inf).amax(-1) for x in (far, near))
        over = torch.sub(*best).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        margin = torch.maximum(margin, over.amax(-1).double())
        count += rows.stop - rows.start
    spread = sums.result()
    return {
        "entropy": spread.entropy,
        "sink_mass": spread.sink_mass,
        "far_mass": (mass / count).cpu(),
        "far_logit": torch.where(margin.isfinite(), margin, torch.nan).cpu(),
    } | axes_probe(attention, method, queries)


def axes_probe(attention: LayerAttention, method: LengthMethod, queries: slice) -> dict[str, Tensor]:
    """Return ``axes_r`` and ``axes_distance`` ``(heads,)`` of the logits in the last part of the queries."""
    side = min(_STRETCH, queries.stop - queries.start)
    rows = slice(queries.stop - side, queries.stop)
    logits = method.scores(attention, rows)[0, ..., rows].double()
    i = torch.arange(side, device=logits.device)
    distance = i[:, None] - i
    hidden = ~logits.isfinite().all(0) & (distance >= 0)
    width = int(distance[hidden].min()) if bool(hidden.any()) else side
    if width < 3 or side < 4:
        nothing = torch.full((attention.heads,), torch.nan, dtype=torch.float64)
        return {"axes_r": nothing, "axes_distance": nothing}
    logits = logits.masked_fill(~logits.isfinite(), 0.0)
    band = Band(side, width, logits.device)
    margins = blocked_margins(lambda i0, i1, j0, j1: logits[:, i0:i1, j0:j1].clone(), attention.heads, band, block=side)
    fit = fit_margins(margins, torch.zeros_like(margins.sums), method="blocked")
    return {"axes_r": fit.r.cpu(), "axes_distance": fit.unique["a"].cpu()}


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
            "output_shift": (moved.norm(dim=-1) / reference.spread.clamp_min(1e-300)).cpu(),
            "output_covariance": ((covariance - reference.covariance).norm(dim=(-1, -2)) / size).cpu(),
            "output_outliers": (self._outliers / self._count).cpu(),
        }


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan
