"""Loss by position, retrieval and attention statistics of one text under every length method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.extend import METHODS, find_method
from wherewhat.extend.method import LengthMethod
from wherewhat.extend.windows import Untouched
from wherewhat.measures.extend.measurement import ExtendConfig
from wherewhat.measures.extend.probes import (
    Reference,
    ShiftSums,
    attention_probe,
    plant,
    planted_gain,
    rank_correlation,
)
from wherewhat.measures.extend.retrieval import Encode, ask, second_copy
from wherewhat.measures.extend.verdicts import LADDER
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject
from wherewhat.measures.tensors import token_losses


def read_in_pieces(
    subject: Subject, ids: Tensor, trained: int, reducer: Callable[[LayerAttention], None] = lambda _: None
) -> Tensor:
    """Return the loss of each token if the unmodified model reads at most the trained length at a time.

    Pieces of that length overlap by half, and the second half of each is used: every token has at least half a trained
    length before it. Each piece begins with the text's first token, which is often an attention sink.

    Args:
        subject: The model.
        ids: Token ids ``(1, n)``.
        trained: The trained length.
        reducer: Called with each layer of the pieces after the first, whose second half is the text beyond.

    Returns:
        Loss by the index it is predicted from, ``(n - 1,)``; NaN in the first half of the first piece.
    """
    n, half = ids.shape[1], trained // 2
    found = torch.full((n - 1,), torch.nan, dtype=torch.float64)
    for start in range(0, n - 1 - half, trained - half):
        stop = min(n - 1, start + trained)
        piece = torch.cat([ids[:, :1], ids[:, start + 1 : stop]], 1)
        logits = subject.run(piece, reducer if start else lambda _: None, logits=True)
        assert logits is not None
        with_target = torch.cat([piece, ids[:, stop : stop + 1]], 1)
        found[start + half : stop] = token_losses(logits, with_target)[half:]
    return found


def by_multiple(rise: Tensor, trained: int) -> dict[float, float]:
    """Return the mean of ``rise`` ``(n - 1,)`` on each step of the ladder that the text reaches."""
    found = {}
    start = trained
    for multiple in LADDER:
        if start >= len(rise):
            break
        stop = round(multiple * trained)
        found[multiple] = float(rise[start:stop].mean())
        start = stop
    return found


def buckets(values: Tensor, trained: int, *, first: int = 0) -> Tensor:
    """Return mean position and value of each quarter of a trained length from ``first`` on, ``(buckets, 2)``."""
    size = max(1, trained // 4)
    rows = [
        (float(i + min(size, len(values) - i) / 2), float(values[i : i + size].mean()))
        for i in range(first, len(values), size)
    ]
    return torch.tensor(rows)


_Heads = dict[int, dict[str, Tensor]]
"""Values per head by layer and name."""


@dataclass(frozen=True)
class _Inside:
    """Attention of the unmodified model in the second half of the trained length.

    Attributes:
        outputs: Distribution of attention outputs by layer.
        heads: Attention statistics by layer.
        losses: Losses ``(n - 1,)`` of the trained length by the index they are predicted from; empty if not measured.
    """

    outputs: dict[int, Reference]
    heads: _Heads
    losses: Tensor


def measure_lengths(
    subject: Subject, ids: Tensor, config: ExtendConfig, *, encode: Encode | None = None
) -> DocumentScores:
    """Return losses, gains from planted runs, attention and its outputs beyond the trained length, per method.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``, more of them than the trained length.
        config: Options.
        encode: The tokenizer, for the pass key and the codes of ``config.retrieval``; without it they are left out.
    """
    trained = config.trained or subject.trained_length()
    plan = config.loaded_plan()
    if plan is not None:
        subject.check_plan(plan)
    methods = [config.method(name, trained=trained, length=ids.shape[1], plan=plan) for name in config.methods]
    probes = LengthProbes(subject, ids, config, methods, encode=encode)
    whole, heads = probes.whole, probes.heads
    curves: dict[str, Curve] = {}
    for method in methods:
        found = probes.measure(method)
        whole |= {f"{name}_{method.name}": value for name, value in found.whole.items()}
        curves |= {f"{name}_{method.name}": curve for name, curve in found.curves.items()}
        for layer in found.layers:
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
    return DocumentScores([LayerScores(layer, heads[layer]) for layer in sorted(heads)], whole, curves)


class LengthProbes:
    """Measures length methods on one text; the controls, which all methods share, are measured once.

    Losses beyond are compared with those of the same tokens read in pieces of the trained length; planted runs with the
    text without them; attention and its outputs with those of the unmodified model in the second half of the trained
    length, per layer and head. The control for outputs is the same tokens in pieces, without a change of length. Each
    method reads the text twice: intact and planted. With ``config.retrieval`` it also reads a text with a second copy
    of its beginning, and one with facts and questions.

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
        self._inside = _inside(subject, short, methods, logits=config.retrieval)
        in_pieces = {layer: ShiftSums(reference) for layer, reference in self._inside.outputs.items()}
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
        if self._copy is not None:
            half = trained // 2
            self._once = torch.cat([self._inside.losses[:half], self._pieces[half:]])
            again = second_copy(short, trained=trained)
            losses = token_losses(self._untouched(again.ids), again.ids)
            self.whole |= {
                "second_copy_pieces": again.difference(losses, self._once),
                "second_copy_distance": float(self._copy.distance),
            }
        if self._questions is not None and encode is not None:
            for suffix, stated in (("pieces", True), ("chance", False)):
                asked = ask(short, encode, trained=trained, stated=stated)
                found = asked.scores(self._untouched(asked.ids))
                self.whole |= {f"{name}_{suffix}": value for name, value in found.items()}
            self.whole["answers_distance"] = float(self._questions.distance)
        self.heads: _Heads = {
            layer: {f"{name}_inside": x for name, x in statistics.items()}
            | {f"{name}_pieces": x for name, x in in_pieces[layer].result().items()}
            for layer, statistics in self._inside.heads.items()
        }

    def _untouched(self, ids: Tensor) -> Tensor:
        return self._subject.edited(ids, Untouched().attend)

    def measure(self, method: LengthMethod) -> DocumentScores:
        """Return the scores of one method, by metric without the method's name."""
        planting, trained, subject = self._planting, self._trained, self._subject
        ids = planting.control
        beyond = slice(trained, ids.shape[1])
        layers = []

        def observe(attention: LayerAttention) -> Tensor | None:
            output = method.attend(attention)
            sums = ShiftSums(self._inside.outputs[attention.layer])
            sums.add((attention.output if output is None else output)[0, beyond])
            heads = sums.result() | attention_probe(attention, method, beyond, limit=trained)
            layers.append(LayerScores(attention.layer, heads))
            return output

        logits = subject.edited(ids, observe)
        losses = token_losses(logits, ids)
        # Logits of long texts are gigabytes: those that are needed later are copied, and one text's are freed before
        # the next is read.
        end = logits[:, -planting.needed :].clone()
        del logits
        found = planted_gain(planting, subject.edited(planting.planted, method.attend), end)
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
        for name, some in (("found_within", ~far), ("found_beyond", far)):
            whole[name] = float(found.gain[some].mean())
        for index, depth in enumerate(self._depths):
            whole |= {f"found_{depth}": float(found.gain[index]), f"exact_{depth}": float(found.exact[index])}
        if self._copy is not None:
            losses_again = token_losses(subject.edited(self._copy.ids, method.attend), self._copy.ids)
            whole["second_copy"] = self._copy.difference(losses_again, self._once)
        if self._questions is not None:
            whole |= self._questions.scores(subject.edited(self._questions.ids, method.attend))
        curves = {
            "loss_by_position": Curve(buckets(losses, trained), ("bucket", "position and loss")),
            "rise_by_position": Curve(buckets(rise, trained, first=half.start), ("bucket", "position and rise")),
        }
        return DocumentScores(layers, {name: x for name, x in whole.items() if math.isfinite(x)}, curves)


def _inside(subject: Subject, ids: Tensor, methods: Sequence[LengthMethod], *, logits: bool) -> _Inside:
    """Return attention of the unmodified model within the trained length ``(1, n)``, and its losses if asked for."""
    n = ids.shape[1]
    queries = slice(n // 2, n)
    outputs: dict[int, Reference] = {}
    heads: _Heads = {}
    rotating = []

    def measure(attention: LayerAttention) -> None:
        rotating.append(attention.rotation is not None)
        outputs[attention.layer] = Reference.of(attention.output[0, queries])
        heads[attention.layer] = attention_probe(attention, Untouched(), queries, limit=n // 2)

    found = subject.run(ids, measure, logits=logits)
    rotary = [method.name for method in methods if method.rotary]
    if rotary and not any(rotating):
        raise MeasureError(
            f"{rotary[0]} changes distances, and no layer of this model rotates its queries and keys: choose from "
            + ", ".join(name for name in METHODS if not find_method(name).rotary)
        )
    return _Inside(outputs, heads, torch.empty(0) if found is None else token_losses(found, ids))
