"""``wherewhat extend``: loss beyond the trained length under each length method, and what attention does there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.extend import METHODS, LengthMethod, find
from wherewhat.measure.base import Curve, DocumentScores, Measurement, Metric, Subject, option
from wherewhat.measure.lengths.outputs import Reference, Shift, rank_correlation, shift

_NAMES = tuple(method.name for method in METHODS)


@dataclass(frozen=True)
class ExtendConfig:
    """Options of the extend measurement."""

    methods: tuple[str, ...] = option(_NAMES, "length methods to compare; none is the untouched model")
    trained: int | None = option(None, "length the model was trained on; what the model says if not given")
    window: int | None = option(None, "window of methods that have one; the trained length if not given")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in self.methods:
            find(name)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods={self.methods}: give one or more, each once")
        for name in ("trained", "window"):
            value = getattr(self, name)
            if value is not None and value < 4:
                raise ConfigError(f"{name} is {value}: give at least 4 tokens")


def measure_lengths(subject: Subject, ids: Tensor, config: ExtendConfig) -> DocumentScores:
    """Loss inside and beyond the trained length, and the shift of attention outputs, under each method.

    Every method gives what the model gives within its window, so losses inside differ only where a rule acts earlier
    (rescaled frequencies). Outputs beyond are compared with the untouched model's at the second half of the trained
    length, layer by layer and head by head.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``, more of them than the trained length.
        config: Options.

    Raises:
        MeasureError: If the text is not longer than the trained length, or no layer rotates.
    """
    n = ids.shape[1]
    trained = config.trained or subject.trained_length()
    if n <= trained + 1:
        raise MeasureError(
            f"{n} tokens are not beyond the {trained} the model was trained on: ask for more with --tokens and "
            "--beyond, or say less with trained"
        )
    inside, beyond = slice(trained // 2, trained), slice(trained, n)
    references: dict[int, Reference] = {}
    rotates = False

    def remember(attention: LayerAttention) -> None:
        nonlocal rotates
        rotates |= attention.rotation is not None
        references[attention.layer] = Reference.of(attention.output[0, inside])

    subject.run(ids[:, :trained], remember)
    turning = [name for name in config.methods if find(name).rotary]
    if turning and not rotates:
        raise MeasureError(
            f"{turning[0]} changes distances, and no layer of this model rotates its queries and keys: choose of "
            + ", ".join(method.name for method in METHODS if not method.rotary)
        )
    whole: dict[str, float] = {"trained_length": float(trained)}
    curves: dict[str, Curve] = {}
    losses, shifts = [], []
    for name in config.methods:
        method = _method(name, config, trained, n)
        found: list[Shift] = []

        def attend(
            attention: LayerAttention, method: LengthMethod = method, found: list[Shift] = found
        ) -> Tensor | None:
            output = method.attend(attention)
            seen = attention.output if output is None else output
            found.append(shift(references[attention.layer], seen[0, beyond]))
            return output

        by_token = _losses(subject.edited(ids, attend), ids)
        before, after = float(by_token[inside].mean()), float(by_token[trained:].mean())
        moved = torch.cat([x.mean for x in found])
        whole |= {
            f"loss_inside_{name}": before,
            f"loss_beyond_{name}": after,
            f"loss_rise_{name}": after - before,
            f"output_shift_{name}": float(moved.mean()),
            f"output_covariance_{name}": float(torch.cat([x.covariance for x in found]).mean()),
            f"output_outliers_{name}": float(torch.cat([x.outliers for x in found]).mean()),
        }
        curves[f"loss_by_position_{name}"] = Curve(_buckets(by_token, trained), ("bucket", "position and loss"))
        losses.append(after)
        shifts.append(float(moved.mean()))
    ranked = rank_correlation(torch.tensor(shifts), torch.tensor(losses))
    if ranked == ranked:
        whole["rank_shift_loss"] = ranked
    return DocumentScores([], whole, curves)


def _method(name: str, config: ExtendConfig, trained: int, length: int) -> LengthMethod:
    kind = find(name)
    own = {"window": config.window} if config.window is not None and "window" in kind.__dataclass_fields__ else {}
    return kind(**own).fitted(trained=trained, length=length)


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Loss of every token but the first, at its own position, ``(n - 1,)`` float64 on the CPU."""
    targets = ids[0, 1:].to(logits.device)
    predicting = logits[0, :-1]
    parts = [
        torch.nn.functional.cross_entropy(predicting[i : i + 1024].float(), targets[i : i + 1024], reduction="none")
        for i in range(0, len(targets), 1024)
    ]
    return torch.cat(parts).double().cpu()


def _buckets(losses: Tensor, trained: int, *, per_length: int = 4) -> Tensor:
    """Mean position and loss of each quarter of a trained length, ``(buckets, 2)``."""
    size = max(1, trained // per_length)
    rows = [
        (float(i + min(size, len(losses) - i) / 2), float(losses[i : i + size].mean()))
        for i in range(0, len(losses), size)
    ]
    return torch.tensor(rows)


def _metrics(config: ExtendConfig) -> tuple[Metric, ...]:
    words = []
    for prefix, title, unit, reading in (
        ("loss_beyond", "loss beyond, {}", "nats", "Mean loss at positions beyond the trained length."),
        (
            "loss_rise",
            "rise, {}",
            "nats",
            "The same less the loss in the second half of the trained length: 0 is flat.",
        ),
        (
            "output_shift",
            "output shift, {}",
            "",
            "How far the mean attention output beyond lies from that inside, in units of the spread inside.",
        ),
        ("output_outliers", "outliers, {}", "", "Share of outputs beyond farther out than 99 % inside: 0.01 is none."),
    ):
        words += [Metric(f"{prefix}_{name}", title.format(name), unit, reading) for name in config.methods]
    return tuple(words)


EXTEND = Measurement(
    name="extend",
    summary="What the loss becomes beyond the trained length under each length method, and how attention outputs move.",
    config=ExtendConfig,
    measure=measure_lengths,
    twins=(),
    more_metrics=_metrics,
    metrics=(
        Metric("trained_length", "trained length", "tokens", "Where beyond begins."),
        Metric(
            "rank_shift_loss",
            "shift ~ loss, over methods",
            "",
            "Rank correlation over methods of output shift and loss beyond: 1 if outputs that stay where they were in "
            "training go with a low loss.",
        ),
    ),
    limits=(
        "Loss by position mixes what a method forgets with what the text is like: compare methods, not positions. "
        "A window forgets everything before it and may still have a low loss; whether something far back can be found "
        "again is another question. Outputs are compared head by head in mean and covariance, not in what later layers "
        "read from them."
    ),
)
