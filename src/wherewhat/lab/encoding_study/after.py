"""Measurements after training: longer texts, perturbed texts, additive logits."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.extend import find_method
from wherewhat.extend.method import LengthMethod
from wherewhat.extend.windows import Untouched
from wherewhat.lab.encoding_study.corpus import Corpus, spanned
from wherewhat.lab.encoding_study.recipe import AfterConfig
from wherewhat.lab.encoding_study.scores import memory_for, next_losses
from wherewhat.lab.model import LabModel
from wherewhat.lab.steps import products
from wherewhat.lab.subject import LabSubject
from wherewhat.measures.measurement import DocumentScores, Subject
from wherewhat.measures.perturb.losses import measure_perturb
from wherewhat.measures.perturb.measurement import PerturbConfig
from wherewhat.measures.residual import ResidualConfig, measure_residual
from wherewhat.runs.schema import Profile

BUCKETS = 4
"""Number of position ranges that a context is divided into."""


def applicable(model: LabModel, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Return the length methods that apply to a model.

    None extends learned positions beyond the context. Methods that change distances need rotation.
    """
    if model.positions is not None:
        return ()
    return tuple(name for name in methods if model.rotation is not None or not find_method(name).rotary)


def loss_by_position(model: LabModel, windows: Tensor, *, context: int, methods: tuple[str, ...]) -> dict[str, Profile]:
    """Return losses in nats, by text and position range of a quarter context, under each method that applies.

    Args:
        model: The trained model.
        windows: Texts ``(texts, n)``.
        context: Number of tokens of the training sequences.
        methods: Names of length methods.

    Returns:
        ``position``, the middle of each range, and ``loss_by_position_<method>``, ``(texts, ranges)``. Models with
        learned positions are measured on texts of their context only, without a method.
    """
    names = applicable(model, methods)
    if model.positions is not None:
        windows, names = windows[:, :context], (Untouched.name,)
    subject = LabSubject(model, trained_length=context)
    found: dict[str, Profile] = {}
    for name in names:
        method = find_method(name)().fitted(trained=context, length=windows.shape[1])
        losses = _losses(subject, windows, method)
        position, buckets = _ranges(losses, max(1, context // BUCKETS))
        found["position"] = Profile(position, ("stretch",))
        found[f"loss_by_position_{name}"] = Profile(buckets, ("document", "stretch"))
    return found


def _losses(subject: Subject, windows: Tensor, method: LengthMethod) -> Tensor:
    """Return the loss at every position but the first, ``(texts, n - 1)`` on the CPU."""

    def attend(attention: LayerAttention) -> Tensor | None:
        output = method.attend(attention, block_mib=memory_for(attention))
        return None if output is None else output.to(attention.value.dtype)

    return next_losses(subject.edited(windows, attend), windows).cpu()


def _ranges(losses: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return middle position ``(ranges,)`` and mean loss ``(texts, ranges)`` of each range of ``size`` positions."""
    parts = torch.split(losses.double(), size, 1)
    starts = [index * size for index in range(len(parts))]
    middles = [start + 1 + (part.shape[1] - 1) / 2 for start, part in zip(starts, parts, strict=True)]
    return torch.tensor(middles), torch.stack([part.mean(1) for part in parts], 1).float()


def measure_after(model: LabModel, corpus: Corpus, config: AfterConfig, *, context: int) -> dict[str, Profile]:
    """Return the curves of a trained model, one row per document, all in float32.

    Returns:
        ``position`` and ``loss_by_position_<method>`` of :func:`loss_by_position`; ``loss_by_rate_<kind>``
        ``(documents, rates, columns)`` with rate, loss, loss on unperturbed targets, its increase and share of moved
        bytes; ``loss_by_strength`` ``(documents, strengths, 2)`` with λ and loss; ``cost_without_a`` and
        ``cost_without_c`` ``(documents,)``.
    """
    with torch.no_grad(), products("highest"):
        long = corpus.windows(config.length_documents, config.times * context, seed=config.seed)
        found = loss_by_position(model, long, context=context, methods=config.methods)
        subject = LabSubject(model, trained_length=context)
        found |= _perturbed(subject, corpus, config, context)
        found |= _residual(subject, corpus, config, context)
    return found


def _perturbed(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Profile]:
    options = PerturbConfig(
        kinds=config.kinds, rates=config.rates, seeds=config.draws, axes=False, equivalence=False, seed=config.seed
    )
    # Jitter increases positions, and learned positions end with the context.
    length = context - options.reach
    windows = corpus.windows(config.perturb_documents, length, seed=config.seed)
    measured = [measure_perturb(subject, spanned(ids), options) for ids in windows]
    return _curves(measured, ("rate", "rate, loss, untouched, rise of untouched, moved"))


def _residual(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Profile]:
    options = ResidualConfig(strengths=config.strengths, layers=False)
    windows = corpus.windows(config.residual_documents, context, seed=config.seed)
    measured = [measure_residual(subject, ids[None], options) for ids in windows]
    costs = {
        name: Profile(_stacked([torch.tensor(document.whole[name]) for document in measured]), ("document",))
        for name in ("cost_without_a", "cost_without_c")
    }
    return _curves(measured, ("strength", "strength, loss")) | costs


def _curves(measured: list[DocumentScores], axes: tuple[str, ...]) -> dict[str, Profile]:
    """Return the curves of all documents stacked, by name."""
    return {
        name: Profile(_stacked([document.curves[name].values for document in measured]), ("document", *axes))
        for name in measured[0].curves
    }


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).float()
