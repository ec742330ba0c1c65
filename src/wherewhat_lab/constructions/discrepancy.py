"""Discrepancy: the difference of the largest and the second largest logit of a query, by length of the input.

Softmax depends on differences only, so a head that attends to one key of n needs a difference that does not vanish with
n. For the constructions of arXiv 2605.31558 it is known exactly (``docs/constructions.md`` derives it); for any other
head it is measured. Logits of constructions are those of queries and keys of length 1, without a scale. An input has n
tokens, the last of which is the query: distances go from 0 to n - 1.

A head fails at the length where the attention weight of its correct key is one half or less. Its logits are
``scale · Re Σ_f z_f e^{iθ_f d}``, with z_f the product of query and conjugate key in plane f, before rotation, and d
their distance. The correct key, whose logit exceeds that of key j by g_j, has the weight ``1 / (1 + Σ_j exp(-g_j))``,
which is above 1/2 while ``Σ_j exp(-g_j) < 1``. The smallest g is the discrepancy times the scale: above log(n - 1) it
is sufficient, below 0 it is not, and in between it depends on all keys, so all are summed. Longer inputs add keys in
front, at distances n and more, whose contents are assumed to be like those of observed keys: so frequencies and
magnitudes predict the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.planes.coordinates import Planes
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.task import SequenceTask

Input = Literal["best", "worst"]
"""The input with the largest or with the smallest discrepancy."""


def index_discrepancy(n: int, theta: float, *, at: Input = "best") -> float:
    """Return the discrepancy of the Index construction, ``min over 1 ≤ t ≤ T of 1 - cos tθ``.

    The key at distance d has the logit ``cos((d - m)θ)`` for the integer m. Keys reach m positions to the right of the
    one pointed at and n - 1 - m to the left, and cosines are even, so T is ``max(m, n - 1 - m)``: ``⌈(n - 1) / 2⌉`` at
    the best m, n - 1 at the worst (m = n - 1, or a letter, which points at itself). It is positive at every n if and
    only if θ/π is irrational.

    Args:
        n: Tokens of the input.
        theta: Angle per position.
        at: The largest or the smallest over inputs.
    """
    _check(n, theta)
    reach = n // 2 if at == "best" else n - 1
    return float(_one_minus_cos(torch.arange(1, reach + 1, dtype=torch.float64) * theta).min())


def index_bound(n: int, theta: float, *, at: Input = "worst") -> float:
    """Return an upper bound of :func:`index_discrepancy`, ``min{1 - cos θ, 2π² / (T + 1)²}``.

    By Dirichlet's theorem some t ≤ T has tθ within ``2π / (T + 1)`` of a multiple of 2π, and ``1 - cos x ≤ x² / 2``. At
    the worst input this is the theorem's ``min{1 - cos θ, 2π² / n²}``.
    """
    _check(n, theta)
    reach = n // 2 if at == "best" else n - 1
    return min(float(_one_minus_cos(torch.tensor(theta, dtype=torch.float64))), 2 * (math.pi / (reach + 1)) ** 2)


def retrieval_discrepancy(n: int, theta: float, omega: float, *, at: Input = "best") -> float:
    """Return the discrepancy of the Retrieval construction: the correct key's logit minus the largest other.

    The key at distance d whose letter is a steps after the queried one has the logit ``cos(dθ + aω)``. One key, at a
    distance D from 1 to n - 1, has a = 0; at any other distance, including the query's own 0, a is anything else. The
    best input takes the farthest letter everywhere, the worst the nearest.

    Args:
        n: Tokens of the input, 2 or more.
        theta: Angle per position; 0 for none.
        omega: Angle between neighbouring letters, 2π over their number.
        at: The largest or the smallest over inputs; below 0 where the head is wrong on that input.
    """
    _check(n, theta, zero=True)
    letters = count_letters(omega)
    distances = torch.arange(n, dtype=torch.float64) * theta
    # Differences of cosines near 1 lose digits, those of 1 - cos do not.
    lost = _one_minus_cos(distances[:, None] + torch.arange(1, letters, dtype=torch.float64) * omega)
    lost = lost.amax(1) if at == "best" else lost.amin(1)
    smallest, where = lost.topk(2, largest=False)
    other = torch.full_like(distances, float(smallest[0]))
    other[where[0]] = smallest[1]  # the correct key is not among the others
    gap = (other - _one_minus_cos(distances))[1:]
    return float(gap.max() if at == "best" else gap.min())


def retrieval_bound(n: int, theta: float, omega: float) -> float:
    """Return the theorem's bound of the discrepancy of Retrieval, ``1 - cos(ω - nθ)``, for nθ ≤ ω.

    It holds at the worst input for distances up to n, which are inputs of n + 1 tokens.
    """
    _check(n, theta, zero=True)
    return float(_one_minus_cos(torch.tensor(omega - n * theta, dtype=torch.float64)))


def count_letters(omega: float) -> int:
    """Return the number of letters with an angle ``omega`` between neighbours."""
    letters = round(2 * math.pi / omega) if 0 < omega <= 2 * math.pi else 0
    if letters < 2 or not math.isclose(letters * omega, 2 * math.pi, rel_tol=1e-9):
        raise ConfigError(f"omega is {omega}: give 2π over the number of letters, which is 2 or more")
    return letters


def measured_discrepancy(attention: LayerAttention, *, right: Tensor | None = None) -> Tensor:
    """Return the last query's largest logit minus its second largest, per head and input, ``(heads, inputs)`` float64.

    Args:
        attention: One layer of a pass over inputs of one length.
        right: Positions of the keys that should have the largest logits, ``(inputs,)``. With them, the result is their
            logits minus the largest others: below 0 where another key has the largest.
    """
    row = slice(attention.n - 1, attention.n)
    visible = attention.visible(row)
    scores = attention.attn_scores(row).double().masked_fill(~visible, -torch.inf)[:, :, 0]  # (inputs, heads, keys)
    if attention.m < 2 or int(visible.sum(-1).min()) < 2:
        raise MeasureError(f"the last of {attention.n} queries sees fewer than two keys: there is no second largest")
    if right is None:
        first, second = scores.topk(2, dim=-1).values.unbind(-1)
        return (first - second).T.cpu()
    index = _right_keys(right, attention, scores)
    at_right = scores.gather(-1, index)
    if bool(at_right.isinf().any()):
        raise MeasureError("a right key is hidden from the last query: give keys that it sees")
    return (at_right - scores.scatter(-1, index, -torch.inf).amax(-1, keepdim=True))[..., 0].T.cpu()


def _right_keys(right: Tensor, attention: LayerAttention, scores: Tensor) -> Tensor:
    """Check the positions of correct keys and return them as an index into scores, ``(inputs, heads, 1)``."""
    inputs, heads, _ = scores.shape
    if right.shape != (inputs,) or int(right.min()) < 0 or int(right.max()) >= attention.m:
        raise MeasureError(
            f"right keys {tuple(right.shape)} must be one position from 0 to {attention.m - 1} for each of {inputs} "
            "inputs"
        )
    return right.to(scores.device)[:, None, None].expand(-1, heads, 1)


def _one_minus_cos(x: Tensor) -> Tensor:
    return 2 * (x / 2).sin().square()


def _check(n: int, theta: float, *, zero: bool = False) -> None:
    if n < 2:
        raise ConfigError(f"n is {n}: a second largest logit needs 2 tokens or more")
    if not (0 < theta < math.inf or (zero and theta == 0)):
        raise ConfigError(f"theta is {theta}: give a positive angle{' or 0' if zero else ''}")


_ENTRIES = 2**23


@torch.no_grad()
def head_failure_lengths(
    attention: LayerAttention, right: Tensor, *, like: slice = slice(None, -1), longest: int = 5000
) -> Tensor:
    """Predict the length at which the last query's correct key has half of the attention weight or less.

    The input's own keys are used directly; each key that a longer input adds in front is represented by the mean over
    the keys at ``like`` except the correct one, moved to its distance.

    Args:
        attention: One layer of a pass over inputs of one length.
        right: Positions of the correct keys, ``(inputs,)``.
        like: Positions of the input whose keys represent those of added tokens; a few dozen give better predictions, so
            use inputs that already have some added tokens.
        longest: Largest number of tokens to consider.

    Returns:
        Numbers of tokens, ``(heads, inputs)`` float64; infinite where ``longest`` is not enough.
    """
    n, row = attention.n, slice(attention.n - 1, attention.n)
    plain = attention.bias(row) is None and attention.softcap is None and attention.sinks is None
    if not plain or n != attention.m or not bool(attention.visible(row).all()):
        raise MeasureError(f"layer {attention.layer} is not plain causal attention: its logits are not planes alone")
    scores = attention.attn_scores(row).double()[:, :, 0]  # (inputs, heads, n)
    index, inputs = _right_keys(right, attention, scores), len(scores)
    moved = torch.arange(n)[like]
    counted = (moved != right.cpu()[:, None]).double()  # (inputs, like)
    if not bool(counted.sum(-1).all()) or longest < n:
        raise ConfigError(f"like={like} must name keys that are not right, and longest={longest} be {n} or more")
    counted = (counted / counted.sum(-1, keepdim=True)).to(scores.device)
    at_right = scores.gather(-1, index)
    own = (scores - at_right).exp().scatter(-1, index, 0.0).sum(-1)  # (inputs, heads)

    planes = Planes.of(attention.rotation, attention.rot_q.shape[-1], device=scores.device)
    away = torch.arange(n, longest, dtype=torch.float64, device=scores.device)
    from_here = (n - 1 - moved).double().to(scores.device)
    groups = attention.heads // attention.kv_heads
    step = max(1, _ENTRIES // max(1, len(moved) * len(away)))
    lengths = torch.full((attention.heads, inputs), math.inf, dtype=torch.float64)
    for head in range(attention.heads):
        q = planes.to_complex(planes.arrange(attention.rot_q[:, head, -1]))
        k = planes.to_complex(planes.arrange(attention.rot_k[:, head // groups][:, moved.to(scores.device)]))
        # Rotated back by their own distance, so that any other can be applied.
        z = q[:, None] * k.conj() * _turns(planes.angles, -from_here)
        for start in range(0, inputs, step):
            rows = slice(start, start + step)
            logits = attention.scale * (z[rows] @ _turns(planes.angles, away).T).real  # (inputs, like, away)
            mass = (logits - at_right[rows, head, :, None]).exp_().mul_(counted[rows, :, None]).sum(1)
            total = own[rows, head, None] + torch.nn.functional.pad(mass.cumsum(-1), (1, 0))
            over = total >= 1  # of the weight of the correct key
            first = n + over.double().argmax(-1).double()
            lengths[head, rows] = torch.where(over.any(-1), first, math.inf).cpu()
    return lengths


_ADDED = 48
"""Tokens added in front of the inputs, as samples of the contents of added tokens."""

_HOP_SHARE = 0.8
"""Share of inputs on which a hop head must have its largest weight on the correct key."""


@dataclass(frozen=True)
class HopHead:
    """A head that makes the first hop, and its predicted failure.

    Attributes:
        layer: Its layer.
        head: Its index in the layer.
        surviving: Predicted share of inputs on which the target still has half of the weight, ``(lengths,)``.
    """

    layer: int
    head: int
    surviving: Tensor


@torch.no_grad()
def predict_hop_heads(model: LabModel, task: SequenceTask, lengths: Sequence[int]) -> list[HopHead]:
    """Return the heads that make the first hop on one-hop inputs, with the lengths at which they are predicted to fail.

    The prediction is made from inputs a few dozen tokens longer than the training sequences: further keys in front are
    assumed to be like those of the added tokens, moved to their distance.
    """
    sequences = task.sample(96, seed=2, hops=1, extra=_ADDED)
    right = sequences.path[:, 1]
    device = model.embedding.device
    hop_heads = []
    for attention in model.attention(sequences.tokens.to(device)):
        weights = attention.pattern(slice(attention.n - 1, attention.n))[:, :, 0]  # (inputs, heads, keys)
        hits = (weights.argmax(-1).cpu() == right[:, None]).double().mean(0)
        heads = (hits >= _HOP_SHARE).nonzero()[:, 0].tolist()
        if not heads:
            continue
        # Added tokens precede the target window, like all further ones.
        failing = head_failure_lengths(attention, right, like=slice(0, _ADDED), longest=max(*lengths, attention.n))
        surviving = torch.stack([(failing > n).double().mean(-1) for n in lengths], 1)  # (heads, lengths)
        hop_heads += [HopHead(attention.layer, head, surviving[head]) for head in heads]
    return hop_heads


def _turns(angles: Tensor, distances: Tensor) -> Tensor:
    """Return ``e^{iθd}``, ``(distances, planes)`` complex128."""
    turn = distances[:, None] * angles
    return torch.polar(torch.ones_like(turn), turn)
