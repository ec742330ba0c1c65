"""Scores of a model: at a training step, and after training on longer and perturbed texts and with additive logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wherewhat.captures.attention import LayerAttention
from wherewhat.lengths import find_method
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.windows import Untouched
from wherewhat.measures.attention import weight_blocks
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.axes.solver import SUBSETS
from wherewhat.measures.heads.patterns import SlashSums, TargetSums
from wherewhat.measures.measurement import Subject
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.perturb.losses import measure_perturb
from wherewhat.measures.planes.coordinates import Planes
from wherewhat.measures.planes.statistics import plane_stats
from wherewhat.measures.residual import ResidualConfig, measure_residual, mixed_attention
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import effective_rank
from wherewhat.scores import Column, Scores
from wherewhat_lab.encoding_study.corpus import Corpus, spanned
from wherewhat_lab.encoding_study.recipe import AfterConfig, RecordConfig
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import products
from wherewhat_lab.subject import LabSubject, by_head, fold, unfold

_BLOCK_MIB = {"cpu": 64, "cuda": 2048}
"""Memory for one block of attention weights."""

HEAD = ("layer", "head")
AXES: Mapping[str, tuple[str, ...]] = {
    "loss": ("window",),
    "loss_additive": ("document",),
    **dict.fromkeys((f"r_{subset}" if subset != "abc" else "r" for subset in SUBSETS), HEAD),
    **dict.fromkeys(("r_behaviour", "q_rank", "k_rank", "s_pos", "s_sym", "previous_token", "induction"), HEAD),
    "noise_floor": (),
    "previous_token_uniform": (),
    "induction_uniform": (),
    "copying": ("repeat",),
    **dict.fromkeys(("slow_dominance", "q_concentration", "k_concentration"), HEAD),
    "plane_share": ("layer", "plane"),
}
"""Dimensions of each score of a record; scores of planes exist with rotation only."""


@dataclass(frozen=True)
class HeldOutText:
    """Fixed bytes that a model is scored on.

    Attributes:
        windows: Text, ``(loss_windows, context)``; heads are scored on the first ``documents``.
        repeats: Random bytes whose second half is the first, ``(repeats, context)``.
    """

    windows: Tensor
    repeats: Tensor

    @classmethod
    def of(cls, corpus: Corpus, context: int, config: RecordConfig) -> HeldOutText:
        """Draw windows and random bytes with the config's seed."""
        return cls(
            corpus.windows(config.loss_windows, context, seed=config.seed),
            corpus.repeats(config.repeats, context, seed=config.seed),
        )


def score(subject: Subject, held_out: HeldOutText, config: RecordConfig) -> dict[str, Tensor]:
    """Return all scores of a model, float32 on the CPU, in the shapes of :data:`AXES`.

    Scores of heads are means over documents (and queries). ``loss`` is the mean next-byte loss of each window in
    nats, ``loss_additive`` that of each document with all heads' logits replaced by their additive fit, ``copying`` the
    loss on the first half of a repeated sequence minus that on the second.
    """
    layers: list[LayerAttention] = []
    ids = torch.cat([held_out.windows, held_out.repeats])
    logits = subject.run(ids, layers.append, logits=True)
    assert logits is not None
    count, documents = len(held_out.windows), config.documents
    losses = next_losses(logits, ids)
    half = held_out.repeats.shape[1] // 2
    repeated = losses[count:]
    scores = {
        "loss": losses[:count].mean(-1),
        "copying": repeated[:, : half - 1].mean(-1) - repeated[:, half:].mean(-1),
        "loss_additive": additive_loss(subject, held_out.windows[:documents]),
    }
    stack = fold(layers, slice(0, documents))
    scores |= _axes(stack, len(layers), documents)
    scores |= _swaps(stack, len(layers), documents, config.queries)
    scores |= _previous(stack, len(layers), documents)
    scores |= _ranks(stack, len(layers), documents, config.rank_documents)
    scores |= _planes(fold(layers, slice(0, config.plane_documents)), len(layers), config.plane_documents)
    scores |= _induction(layers, held_out.repeats, count)
    return {name: value.float().cpu() for name, value in scores.items()}


def next_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of every next byte in nats, ``(batch, n - 1)``, from logits ``(batch, n, vocabulary)``."""
    return cross_entropy(logits[:, :-1].float().mT, ids[:, 1:].to(logits.device), reduction="none")


def additive_loss(subject: Subject, ids: Tensor) -> Tensor:
    """Return the loss ``(batch,)`` of texts ``(batch, n)`` with all logits replaced by their additive fit."""
    texts = len(ids)

    def edit(attention: LayerAttention) -> Tensor:
        folded = fold([attention])
        mixed = mixed_attention(folded, fit_layer(folded), strength=0.0, block_mib=memory_for(folded))
        return unfold(mixed, texts)

    return next_losses(subject.edited(ids, edit), ids).mean(-1)


def _axes(stack: LayerAttention, layers: int, texts: int) -> dict[str, Tensor]:
    fit = fit_layer(stack)
    values = {"r" if subset == "abc" else f"r_{subset}": fit.r_subset[subset] for subset in SUBSETS}
    values["r_behaviour"] = fit.r_behaviour
    scores = {name: by_head(value, layers, texts).nanmean(1) for name, value in values.items()}
    return scores | {"noise_floor": torch.tensor(fit.noise_floor)}


def _swaps(stack: LayerAttention, layers: int, texts: int, queries: int) -> dict[str, Tensor]:
    swaps = layer_swaps(stack, choose_queries(stack.n, count=queries)).cpu()
    return {name: by_head(getattr(swaps, name), layers, texts).mean((1, 3)) for name in ("s_pos", "s_sym")}


def _previous(stack: LayerAttention, layers: int, texts: int) -> dict[str, Tensor]:
    sums = SlashSums(stack, 1)
    for block in weight_blocks(stack, memory_for(stack)):
        sums.add(block)
    slashes = sums.result()
    return {
        "previous_token": by_head(slashes.by_lag[:, 1].cpu(), layers, texts).mean(1),
        "previous_token_uniform": slashes.uniform[1].cpu(),
    }


def _ranks(stack: LayerAttention, layers: int, texts: int, used: int) -> dict[str, Tensor]:
    """Return the effective rank of queries and keys over the tokens of several texts together."""
    tokens = [by_head(x[0], layers, texts)[:, :used] for x in (stack.q, stack.k)]  # (layers, texts, heads, n, d)
    q, k = effective_rank(torch.stack(tokens).movedim(2, 3).flatten(3, 4))
    return {"q_rank": q, "k_rank": k}


def _planes(stack: LayerAttention, layers: int, texts: int) -> dict[str, Tensor]:
    if stack.rotation is None:
        return {}
    q, k = stack.rot_q[0], stack.rot_k[0]
    stats = plane_stats(q, k, Planes.of(stack.rotation, q.shape[-1], device=q.device))
    heads = {
        "slow_dominance": stats.slow_dominance,
        "q_concentration": stats.weighted(stats.q_concentration),
        "k_concentration": stats.weighted(stats.k_concentration),
    }
    scores = {name: by_head(value, layers, texts).nanmean(1) for name, value in heads.items()}
    return scores | {"plane_share": by_head(stats.share, layers, texts).nanmean((1, 2))}


def _induction(layers: list[LayerAttention], repeats: Tensor, first: int) -> dict[str, Tensor]:
    masses, uniform = [], []
    for index, ids in enumerate(repeats):
        stack = fold(layers, slice(first + index, first + index + 1))
        sums = TargetSums(stack, ids[None])
        for block in weight_blocks(stack, memory_for(stack)):
            sums.add(block)
        target = sums.result()["induction"]
        masses.append(torch.unflatten(target.mass.cpu(), 0, (len(layers), -1)))
        uniform.append(float(target.uniform))
    return {"induction": torch.stack(masses).mean(0), "induction_uniform": torch.tensor(uniform).mean()}


def memory_for(attention: LayerAttention) -> int:
    """Return the MiB for one block of attention weights on the layer's device."""
    return _BLOCK_MIB.get(attention.rot_q.device.type, 64)


BUCKETS = 4
"""Number of position ranges that a context is divided into."""


def loss_by_position(model: LabModel, windows: Tensor, *, context: int, methods: tuple[str, ...]) -> dict[str, Column]:
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
    if model.positions is not None:
        windows, names = windows[:, :context], [Untouched.name]
    else:  # methods that change distances need rotation
        names = [name for name in methods if model.rotation is not None or not find_method(name).rotary]
    subject = LabSubject(model, trained_length=context)
    columns: dict[str, Column] = {}
    for name in names:
        method = find_method(name)().fitted(trained=context, length=windows.shape[1])
        losses = _losses(subject, windows, method)
        position, buckets = _ranges(losses, max(1, context // BUCKETS))
        columns["position"] = Column(position, ("stretch",))
        columns[f"loss_by_position_{name}"] = Column(buckets, ("document", "stretch"))
    return columns


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


def measure_after(model: LabModel, corpus: Corpus, config: AfterConfig, *, context: int) -> dict[str, Column]:
    """Return the curves of a trained model, one row per document, all in float32.

    Returns:
        ``position`` and ``loss_by_position_<method>`` of :func:`loss_by_position`; ``loss_by_rate_<kind>``
        ``(documents, rates, columns)`` with rate, loss, loss on unperturbed targets, its increase and share of moved
        bytes; ``loss_by_strength`` ``(documents, strengths, 2)`` with λ and loss; ``cost_without_a`` and
        ``cost_without_c`` ``(documents,)``.
    """
    with torch.no_grad(), products("highest"):
        long = corpus.windows(config.length_documents, config.times * context, seed=config.seed)
        curves = loss_by_position(model, long, context=context, methods=config.methods)
        subject = LabSubject(model, trained_length=context)
        curves |= _perturbed(subject, corpus, config, context)
        curves |= _residual(subject, corpus, config, context)
    return curves


def _perturbed(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Column]:
    options = PerturbConfig(
        kinds=config.kinds, rates=config.rates, seeds=config.draws, axes=False, equivalence=False, seed=config.seed
    )
    # Jitter increases positions, and learned positions end with the context.
    length = context - options.reach
    windows = corpus.windows(config.perturb_documents, length, seed=config.seed)
    measured = [measure_perturb(subject, spanned(ids), options) for ids in windows]
    return _curves(measured, ("rate", "rate, loss, untouched, rise of untouched, moved"))


def _residual(subject: Subject, corpus: Corpus, config: AfterConfig, context: int) -> dict[str, Column]:
    options = ResidualConfig(strengths=config.strengths, layers=False, control=False)
    windows = corpus.windows(config.residual_documents, context, seed=config.seed)
    measured = [measure_residual(subject, ids[None], options) for ids in windows]
    costs = {
        name: Column(_stacked([torch.tensor(document.whole[name]) for document in measured]), ("document",))
        for name in ("cost_without_a", "cost_without_c")
    }
    return _curves(measured, ("strength", "strength, loss")) | costs


def _curves(measured: list[Scores], axes: tuple[str, ...]) -> dict[str, Column]:
    """Return the curves of all documents stacked, by name."""
    return {
        name: Column(_stacked([document.curves[name].values for document in measured]), ("document", *axes))
        for name in measured[0].curves
    }


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).float()
