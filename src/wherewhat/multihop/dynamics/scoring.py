"""All that is watched of a model while it learns: its heads on fixed sequences, and its answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measure.axes.fit import fit_axes
from wherewhat.measure.frequencies.use import mean_frequency
from wherewhat.measure.swaps.scores import TAU
from wherewhat.multihop.dynamics.accuracy import Accuracy, count_hits, judge
from wherewhat.multihop.dynamics.held_out import HeldOut
from wherewhat.multihop.dynamics.parts import in_parts, rows_in_parts
from wherewhat.multihop.dynamics.querying import score_query
from wherewhat.multihop.dynamics.watching import Watched, watch
from wherewhat.multihop.model import LabModel


@dataclass(frozen=True)
class HeadScores:
    """A model at one moment; everything is on the CPU.

    Attributes:
        s_pos: Positional score at the last token of each sequence, ``(layers, heads, count)`` float64.
        s_sym: Symbolic score, likewise.
        entropy: Entropy of the attention weights at the last token in nats, likewise.
        r: Correlation of the logits with a sum of a distance, a query and a key term, fitted to each sequence by
            itself, likewise; NaN where the logits are constant.
        r_pooled: √(1 - ΣSSE / ΣTSS) over the sequences, ``(layers, heads)``: sequences with more variance count more.
        use: Largest absolute logit contribution of each rotated plane at the last token, mean over sequences,
            ``(layers, heads, planes)``.
        mean_frequency: Mean frequency ID, weighted by use, ``(layers, heads)``; 1 turns fastest, NaN without planes.
        s_pos_path: Positional score at the tokens that hops leave from, mean over all of them, ``(layers, heads)``;
            NaN if not asked for.
        s_sym_path: Symbolic score, likewise.
        accuracy: Right answers by number of hops.
    """

    s_pos: Tensor
    s_sym: Tensor
    entropy: Tensor
    r: Tensor
    r_pooled: Tensor
    use: Tensor
    mean_frequency: Tensor
    s_pos_path: Tensor
    s_sym_path: Tensor
    accuracy: Accuracy


@dataclass(frozen=True)
class _Part:
    """Scores of some sequences, ``(layers, heads, ...)``; sums over them where several become one."""

    by_sequence: Tensor  # (4, layers, heads, count): both scores, entropy, r
    errors: Tensor  # (2, layers, heads): SSE and TSS
    use: Tensor
    path: Tensor  # (3, layers, heads): both scores, and how many tokens


def score_model(model: LabModel, held_out: HeldOut, *, path: bool = False, tau: float = TAU) -> HeadScores:
    """Score every head of a model and count its right answers.

    Scores are those of :func:`wherewhat.measure.swaps.layer.layer_swaps`,
    :func:`wherewhat.measure.frequencies.use.frequency_use` and :func:`wherewhat.measure.axes.layer.fit_layer` at the
    last token of each sequence, for all sequences and layers together.

    Args:
        model: The model.
        held_out: The sequences.
        path: Also score the other tokens that hops leave from.
        tau: Temperature of the weights of swaps.

    Raises:
        MeasureError: If sequences are too short to swap keys in, or logits are not finite.
    """
    sequences, scored = held_out.sequences, held_out.scored
    device, n = model.embedding.device, sequences.tokens.shape[1]
    if n < 4:
        raise MeasureError(f"sequences of {n} tokens are too short to score heads on: at least 4 are needed")
    model.places(n)  # once, before threads ask for it

    def run(rows: slice) -> tuple[_Part | None, Tensor]:
        tokens = sequences.tokens[rows].to(device)
        if rows.start >= scored:
            return None, judge(model(tokens), sequences.answers[rows])
        watched = watch(model, tokens)
        return _score(watched, sequences.path[rows], path, tau), judge(watched.logits, sequences.answers[rows])

    rest = rows_in_parts(len(sequences) - scored, n, device)
    parts = rows_in_parts(scored, n, device) + [slice(scored + r.start, scored + r.stop) for r in rest]
    found = in_parts(run, parts, device)
    each = [part for part, _ in found if part is not None]
    s_pos, s_sym, entropy, r = torch.cat([part.by_sequence for part in each], -1).cpu()
    sse, tss = torch.stack([part.errors for part in each]).sum(0).cpu()
    use = torch.stack([part.use for part in each]).sum(0).cpu() / scored
    along = torch.stack([part.path for part in each]).sum(0).cpu()
    frequency = torch.full_like(sse, torch.nan)
    if model.rotation is not None:
        frequency = mean_frequency(use.flatten(0, 1), model.rotation.inv_freq).view_as(sse)
    return HeadScores(
        s_pos=s_pos,
        s_sym=s_sym,
        entropy=entropy,
        r=r,
        r_pooled=(1 - sse / tss).clamp(0, 1).sqrt(),
        use=use,
        mean_frequency=frequency,
        s_pos_path=along[0] / along[2],
        s_sym_path=along[1] / along[2],
        accuracy=count_hits(torch.cat([judged for _, judged in found], 1).cpu(), sequences.hops, held_out.hops),
    )


def _score(watched: Watched, path: Tensor, along: bool, tau: float) -> _Part:
    layers, count, heads, n, _ = watched.rot_q.shape
    found = score_query(watched, n - 1, tau=tau)
    by_distance: Tensor | None = None
    if watched.bias is not None:  # ALiBi, the only one there is, depends on the distance alone
        by_distance = watched.bias[:, None, :, -1].flip(-1).expand(-1, count, -1, -1).flatten(0, 2)
    fit = fit_axes(
        watched.rot_q.flatten(0, 2), watched.rot_k.flatten(0, 2), scale=watched.scale, distance_bias=by_distance
    )
    r, sse, tss = (x.view(layers, count, heads) for x in (fit.r, fit.sse, fit.tss))
    sums = torch.zeros(3, layers, heads, dtype=torch.float64, device=r.device)
    if along:
        for query, rows in _leaving(path):
            some = score_query(watched, query, rows.to(r.device), tau=tau)
            sums += torch.stack([some.s_pos.sum(1), some.s_sym.sum(1), torch.full_like(sums[2], len(rows))])
    return _Part(
        by_sequence=torch.stack([found.s_pos, found.s_sym, found.entropy, r]).mT,
        errors=torch.stack([sse.sum(1), tss.sum(1)]),
        use=found.use.double().sum(1),
        path=sums,
    )


def _leaving(path: Tensor) -> list[tuple[int, Tensor]]:
    """Positions that hops leave from and that have two keys before them, each with the sequences where one does."""
    leaves = path.scatter(1, (path >= 0).sum(1, keepdim=True) - 1, -1)  # no hop leaves the answer
    positions: set[int] = set(leaves[leaves >= 2].tolist())
    return [(position, (leaves == position).any(1).nonzero()[:, 0]) for position in sorted(positions)]
