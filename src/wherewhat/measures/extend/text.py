"""Losses by position and attention statistics of one text under every length method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.extend.method import LengthMethod
from wherewhat.extend.methods import METHODS, find_method
from wherewhat.extend.windows import Untouched
from wherewhat.measures.extend.measurement import LADDER, ExtendConfig
from wherewhat.measures.extend.probes import (
    Planting,
    Reference,
    ShiftSums,
    find_planted,
    look,
    plant,
    rank_correlation,
    shift,
)
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject
from wherewhat.measures.tensors import token_losses


def read_in_pieces(
    subject: Subject, ids: Tensor, trained: int, look: Callable[[LayerAttention], None] = lambda _: None
) -> Tensor:
    """What the untouched model loses on each token when it never reads more than the trained length.

    Pieces of that length overlap by half, and of each the second half counts: every token has at least half a trained
    length before it. Each piece begins with the text's first token, on which attention often rests.

    Args:
        subject: The model.
        ids: Token ids ``(1, n)``.
        trained: The trained length.
        look: Is handed each layer of the pieces behind the first: the second half of these is the text beyond.

    Returns:
        Loss by the place it is foretold from, ``(n - 1,)``; NaN in the first half of the first piece.
    """
    n, half = ids.shape[1], trained // 2
    found = torch.full((n - 1,), torch.nan, dtype=torch.float64)
    for start in range(0, n - 1 - half, trained - half):
        stop = min(n - 1, start + trained)
        piece = torch.cat([ids[:, :1], ids[:, start + 1 : stop]], 1)
        logits = subject.run(piece, look if start else lambda _: None, logits=True)
        assert logits is not None
        with_target = torch.cat([piece, ids[:, stop : stop + 1]], 1)
        found[start + half : stop] = token_losses(logits, with_target)[half:]
    return found


def by_multiple(rise: Tensor, trained: int) -> dict[float, float]:
    """Mean of ``rise`` ``(n - 1,)`` on each step of the ladder that the text reaches."""
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
    """Mean position and value of each quarter of a trained length from ``first`` on, ``(buckets, 2)``."""
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
    """What the untouched model does on the first part of a text, as long as in training.

    Attributes:
        outputs: Attention outputs in the second half of it, by layer.
        heads: What attention is like there, by layer.
        rotates: Whether any layer rotates.
    """

    outputs: dict[int, Reference]
    heads: _Heads
    rotates: bool


def measure_lengths(subject: Subject, ids: Tensor, config: ExtendConfig) -> DocumentScores:
    """Losses, planted runs, attention and its outputs beyond the trained length, under each method.

    Losses beyond are compared with those of the same tokens read in pieces of the trained length; planted runs with the
    text that has none; attention and its outputs with the untouched model's in the second half of the trained length,
    layer by layer and head by head. How far outputs differ without any change of length is told by those of the same
    tokens in pieces. Each method reads the text twice: as it is, and planted.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``, more of them than the trained length.
        config: Options.
    """
    n = ids.shape[1]
    trained = config.trained or subject.trained_length()
    if n <= trained + 1:
        raise MeasureError(
            f"{n} tokens are not beyond the {trained} the model was trained on: ask for more with --tokens and "
            "--beyond, or say less with trained"
        )
    methods = [config.method(name, trained=trained, length=n) for name in config.methods]
    for method in methods:
        method.check(n)
    piece = plant(torch.cat([ids[:, :1], ids[:, n - trained + 1 :]], 1), config.depths, run=config.run)
    planting = plant(ids, config.depths, run=config.run)
    inside = _inside(subject, ids[:, :trained], methods)
    unmoved = {layer: ShiftSums(reference) for layer, reference in inside.outputs.items()}
    pieces = read_in_pieces(
        subject, ids, trained, lambda attention: unmoved[attention.layer].add(attention.output[0, trained // 2 :])
    )
    whole: dict[str, float] = {
        "trained_length": float(trained),
        "text_length": float(n),
        "loss_pieces": float(pieces[trained:].mean()),
        "found_pieces": float(find_planted(piece, *_both(subject, piece, Untouched())).gain.mean()),
    } | {f"distance_{depth}": float(x) for depth, x in zip(config.depths, planting.distances, strict=True)}
    curves: dict[str, Curve] = {}
    heads: _Heads = {
        layer: {f"{name}_inside": x for name, x in of.items()}
        | {f"{name}_pieces": x for name, x in unmoved[layer].result().heads().items()}
        for layer, of in inside.heads.items()
    }
    for method in methods:
        found = _measured(subject, planting, method, config, trained, inside, pieces)
        whole |= {f"{name}_{method.name}": value for name, value in found.whole.items() if math.isfinite(value)}
        curves |= {f"{name}_{method.name}": curve for name, curve in found.curves.items()}
        for layer in found.layers:
            heads[layer.layer] |= {f"{name}_{method.name}": x for name, x in layer.heads.items()}
    shifts = [_mean(heads, f"output_shift_{name}") for name in config.methods]
    ranked = rank_correlation(
        torch.tensor(shifts), torch.tensor([whole[f"loss_beyond_{name}"] for name in config.methods])
    )
    if math.isfinite(ranked):
        whole["rank_shift_loss"] = ranked
    return DocumentScores([LayerScores(layer, heads[layer]) for layer in sorted(heads)], whole, curves)


def _inside(subject: Subject, ids: Tensor, methods: list[LengthMethod]) -> _Inside:
    """Look at the untouched model within the trained length."""
    n = ids.shape[1]
    queries = slice(n // 2, n)
    outputs: dict[int, Reference] = {}
    heads: _Heads = {}
    rotating = []

    def remember(attention: LayerAttention) -> None:
        rotating.append(attention.rotation is not None)
        outputs[attention.layer] = Reference.of(attention.output[0, queries])
        heads[attention.layer] = look(attention, Untouched(), queries, limit=n // 2)

    subject.run(ids, remember)
    turning = [method.name for method in methods if method.rotary]
    if turning and not any(rotating):
        raise MeasureError(
            f"{turning[0]} changes distances, and no layer of this model rotates its queries and keys: choose of "
            + ", ".join(name for name in METHODS if not find_method(name).rotary)
        )
    return _Inside(outputs, heads, any(rotating))


def _measured(
    subject: Subject,
    planting: Planting,
    method: LengthMethod,
    config: ExtendConfig,
    trained: int,
    inside: _Inside,
    pieces: Tensor,
) -> DocumentScores:
    """Numbers of one method, by names without its own."""
    ids = planting.control
    beyond = slice(trained, ids.shape[1])
    layers = []

    def attend(attention: LayerAttention) -> Tensor | None:
        output = method.attend(attention)
        seen = attention.output if output is None else output
        found = shift(inside.outputs[attention.layer], seen[0, beyond]).heads()
        layers.append(LayerScores(attention.layer, found | look(attention, method, beyond, limit=trained)))
        return output

    logits = subject.edited(ids, attend)
    by_place = token_losses(logits, ids)
    found = find_planted(planting, subject.edited(planting.planted, method.attend), logits)
    rise = by_place - pieces
    half = slice(trained // 2, trained)
    whole = {
        "loss_inside": float(by_place[half].mean()),
        "loss_beyond": float(by_place[trained:].mean()),
        "loss_rise": float(rise[trained:].mean()),
        "rise_inside": float(rise[half].mean()),
    }
    whole |= {f"rise_to_{multiple:g}x": value for multiple, value in by_multiple(rise, trained).items()}
    far = planting.distances >= trained
    for name, some in (("found_within", ~far), ("found_beyond", far)):
        whole[name] = float(found.gain[some].mean())
    for index, depth in enumerate(config.depths):
        whole |= {f"found_{depth}": float(found.gain[index]), f"exact_{depth}": float(found.exact[index])}
    curves = {
        "loss_by_position": Curve(buckets(by_place, trained), ("bucket", "position and loss")),
        "rise_by_position": Curve(buckets(rise, trained, first=half.start), ("bucket", "position and rise")),
    }
    return DocumentScores(layers, whole, curves)


def _both(subject: Subject, planting: Planting, method: LengthMethod) -> tuple[Tensor, Tensor]:
    """Logits ``(1, n, vocabulary)`` on the planted text and on the text as it is."""
    return subject.edited(planting.planted, method.attend), subject.edited(planting.control, method.attend)


def _mean(heads: _Heads, name: str) -> float:
    return float(torch.cat([values[name] for values in heads.values()]).mean())
