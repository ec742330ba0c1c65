"""Attention entropy, sink mass and effective rank: the first look at a model's heads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError
from wherewhat.measure.base import LayerScores, Measurement, Metric, option, per_layer


@dataclass(frozen=True)
class AttentionConfig:
    """Options of the attention measurement."""

    sink_tokens: int = option(1, "number of first tokens that count as attention sink")
    block_mib: int = option(32, "memory for one block of attention weights, in MiB")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.sink_tokens < 1:
            raise ConfigError(f"sink_tokens is {self.sink_tokens}: at least 1 token is needed")
        if self.block_mib < 1:
            raise ConfigError(f"block_mib is {self.block_mib}: at least 1 MiB is needed")


@dataclass(frozen=True)
class AttentionStats:
    """Statistics of one layer's attention on one document.

    Attributes:
        entropy: Mean entropy of the attention weights over queries that see at least two keys, nats, ``(heads,)``.
        uniform_entropy: The same for uniform attention over the visible keys: the most there can be.
        sink_mass: Mean weight on the first tokens over queries after them, ``(heads,)``.
        uniform_sink_mass: The same for uniform attention.
        learned_sink_mass: Mean weight on the model's own sink column, ``(heads,)``; None where it has none.
        q_rank: Effective rank of the queries before rotation, ``(heads,)``.
        k_rank: Effective rank of the keys each head reads, before rotation, ``(heads,)``.
        gaussian_rank: Effective rank of Gaussian noise of the same shape: tokens that have nothing in common.
    """

    entropy: Tensor
    uniform_entropy: float
    sink_mass: Tensor
    uniform_sink_mass: float
    learned_sink_mass: Tensor | None
    q_rank: Tensor
    k_rank: Tensor
    gaussian_rank: float


def attention_stats(attention: LayerAttention, config: AttentionConfig) -> AttentionStats:
    """Entropy, sink mass and effective rank of every head of a layer.

    Attention weights are made a block of queries at a time: memory is ``block_mib``, time n².

    Args:
        attention: One layer, batch 1, n queries over m = n keys.
        config: Options.

    Raises:
        ConfigError: If the text has no query after the sink tokens.
    """
    heads, n, m = attention.heads, attention.n, attention.m
    if n <= config.sink_tokens:
        raise ConfigError(f"sink_tokens is {config.sink_tokens}, but the text has only {n} tokens: give a longer text")
    rows = max(1, config.block_mib * 2**20 // (4 * heads * m))
    device = attention.rot_q.device
    entropy = torch.zeros(heads, dtype=torch.float64, device=device)
    sink = torch.zeros(heads, dtype=torch.float64, device=device)
    learned = torch.zeros(heads, dtype=torch.float64, device=device)
    uniform_entropy = uniform_sink = 0.0
    deciding = after_sink = 0
    for start in range(0, n, rows):
        block = slice(start, min(n, start + rows))
        weights = attention.pattern(block)[0]  # (heads, rows, m)
        visible = attention.visible(block).expand(1, 1, -1, -1)[0, 0]  # (rows, m)
        seen = visible.sum(-1)
        missing = (
            (1 - weights.sum(-1)).clamp_min(0) if attention.sinks is not None else torch.zeros_like(weights[..., 0])
        )
        bits = torch.special.entr(weights).sum(-1) + torch.special.entr(missing)
        choice = seen >= 2
        late = torch.arange(block.start, block.stop, device=device) >= config.sink_tokens
        entropy += bits[:, choice].sum(-1).double()
        sink += weights[:, late, : config.sink_tokens].sum((-1, -2)).double()
        learned += missing.sum(-1).double()
        uniform_entropy += float(seen[choice].double().log().sum())
        uniform_sink += float((visible[late, : config.sink_tokens].sum(-1) / seen[late].clamp_min(1)).double().sum())
        deciding += int(choice.sum())
        after_sink += int(late.sum())
    groups = heads // attention.kv_heads
    return AttentionStats(
        entropy=(entropy / max(1, deciding)).cpu(),
        uniform_entropy=uniform_entropy / max(1, deciding),
        sink_mass=(sink / after_sink).cpu(),
        uniform_sink_mass=uniform_sink / after_sink,
        learned_sink_mass=None if attention.sinks is None else (learned / n).cpu(),
        q_rank=effective_rank(attention.q[0]).cpu(),
        k_rank=effective_rank(attention.k[0]).repeat_interleave(groups).cpu(),
        gaussian_rank=gaussian_rank(m, attention.rot_k.shape[-1]),
    )


def effective_rank(x: Tensor) -> Tensor:
    """Effective rank of ``x`` ``(..., n, d)``: exponential of the entropy of its normalised singular values.

    Between 1 (all tokens alike) and min(n, d). Roy & Vetterli, EUSIPCO 2007. Computed from the d×d Gram matrix in
    float64. Zero tensors give 0.
    """
    x = x.double()
    values = torch.linalg.eigvalsh(x.transpose(-1, -2) @ x).clamp_min(0).sqrt()
    total = values.sum(-1, keepdim=True)
    shares = values / total.clamp_min(1e-300)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


@functools.lru_cache(maxsize=64)
def gaussian_rank(n: int, d: int, *, draws: int = 4) -> float:
    """Mean effective rank of independent Gaussian tokens ``(n, d)``, the rank of tokens that share nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(draws, n, d, generator=generator, dtype=torch.float64)
    return float(effective_rank(x).mean())


def _scores(attention: LayerAttention, config: AttentionConfig) -> LayerScores:
    stats = attention_stats(attention, config)
    heads = {
        "entropy": stats.entropy,
        "sink_mass": stats.sink_mass,
        "q_rank": stats.q_rank,
        "k_rank": stats.k_rank,
    }
    if stats.learned_sink_mass is not None:
        heads["learned_sink_mass"] = stats.learned_sink_mass
    for name, values in heads.items():
        if not bool(values.isfinite().all()):
            raise ConfigError(f"{name} of layer {attention.layer} is not finite: the model's activations overflow")
    return LayerScores(
        layer=attention.layer,
        heads=heads,
        whole={
            "entropy_uniform": stats.uniform_entropy,
            "sink_mass_uniform": stats.uniform_sink_mass,
            "rank_gaussian": stats.gaussian_rank,
        },
    )


ATTENTION = Measurement(
    name="attention",
    summary="Attention entropy, sink mass and effective rank of queries and keys, per head.",
    config=AttentionConfig,
    measure=per_layer(_scores),
    metrics=(
        Metric(
            "entropy",
            "entropy",
            "nats",
            "How many keys a query spreads over: e to this power; the control is attention that spreads evenly.",
            "entropy_uniform",
            "even spread",
        ),
        Metric(
            "sink_mass",
            "sink mass",
            "",
            "Share of attention parked on the first tokens; the control is what even attention would put there.",
            "sink_mass_uniform",
            "even spread",
        ),
        Metric(
            "q_rank",
            "rank of q",
            "",
            "How many directions the queries use; the control is noise. Near 1, all tokens ask the same question.",
            "rank_gaussian",
            "noise",
        ),
        Metric(
            "k_rank",
            "rank of k",
            "",
            "How many directions the keys use; the control is noise. Near 1, all tokens look alike.",
            "rank_gaussian",
            "noise",
        ),
    ),
    limits=(
        "Entropy and sink mass describe where attention goes, not what it does to the output; both depend on the "
        "text and its length. Effective rank counts directions, not how much they matter to the logits."
    ),
)
