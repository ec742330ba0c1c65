"""Scores of all heads on held-out sequences while a model trains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.block import Block
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import Accuracy, count_hits, in_parts, judge, rows_in_parts
from wherewhat.lab.tasks.task import Sequences
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.frequencies.planes import mean_frequency
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.placement import place
from wherewhat.measures.swaps.scores import QueryLogits, score_swaps


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Sequences that are not trained on.

    Attributes:
        sequences: All of them: accuracy is that on these.
        scored: How many of them, from the first on, heads are scored on.
    """

    sequences: Sequences
    scored: int

    @property
    def to_score(self) -> Sequences:
        """Those that heads are scored on."""
        return self.sequences.select(torch.arange(self.scored))

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """The numbers of hops that occur, ascending."""
        return tuple(sorted(set(self.sequences.hops.tolist())))

    @cached_property
    def fingerprint(self) -> int:
        """A number that other sequences, or the same in another order, do not share."""
        digest = hashlib.blake2b(str((self.scored, tuple(self.sequences.tokens.shape))).encode(), digest_size=7)
        for tensor in (self.sequences.tokens, self.sequences.answers):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return int.from_bytes(digest.digest())


def hold_out(sequences: Sequences, *, scored: int = 256, tested: int = 1024) -> HeldOut:
    """Choose from sequences, with numbers of hops in equal shares.

    Accuracy takes most of the time on a CPU: of 1,024 sequences about as long as five training steps. On a GPU all
    that there are cost nothing worth speaking of.

    Args:
        sequences: Where to choose from, such as a task's validation sequences; the first of each number of hops are
            taken.
        scored: How many to score heads on.
        tested: How many to know accuracy from, the scored ones included.
    """
    classes = sorted(set(sequences.hops.tolist()))
    if not len(classes) <= scored <= tested:
        raise ConfigError(
            f"scored is {scored} and tested {tested}: score at least one sequence of each of {len(classes)} numbers of "
            "hops, and test at least those"
        )
    # Ranks within a number of hops: sorting by them takes turns.
    rank = torch.empty_like(sequences.hops)
    for hops in classes:
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rank[rows] = torch.arange(len(rows))
    rows = _in_turns(rank, sequences.hops)[:tested]
    wanted = -(-tested // len(classes))
    if len(rows) < tested or int(rank[rows].max()) >= wanted:
        fewest = min(int((sequences.hops == hops).sum()) for hops in classes)
        raise ConfigError(
            f"tested is {tested}: that takes {wanted} sequences of each number of hops, and of one there are {fewest}; "
            "ask for fewer, or give more"
        )
    return HeldOut(sequences.select(rows), scored)


def _in_turns(rank: Tensor, hops: Tensor) -> Tensor:
    """Row numbers by rank, and by hops among equal ranks."""
    return (rank * (int(hops.max()) + 1) + hops).argsort(stable=True)


@dataclass(frozen=True)
class Watched:
    """Queries and keys of all layers on some sequences.

    Attributes:
        rot_q: Queries after rotation, ``(layers, count, heads, n, d)``.
        rot_k: Keys after rotation, the same shape.
        bias: What is added to the logits, ``(layers, heads, n, n)``; None if nothing is.
        scale: Factor on the dot products.
        rotation: How queries and keys were rotated; None if they were not.
        logits: Logits of the last token, ``(count, vocabulary)``.
    """

    rot_q: Tensor
    rot_k: Tensor
    bias: Tensor | None
    scale: float
    rotation: Rotation | None
    logits: Tensor


@torch.no_grad()
def watch(model: LabModel, tokens: Tensor) -> Watched:
    """Run a model on ``tokens`` ``(count, n)``."""
    places = model.places(tokens.shape[1])
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    queries: list[Tensor] = []
    keys: list[Tensor] = []

    def keep(layer: int, stream: Tensor) -> None:
        if layer < len(blocks):
            block = blocks[layer]
            q, k, _ = block.project(block.norm(stream), places[layer], last=False)
            queries.append(q)
            keys.append(k)

    logits = model(tokens, edit_stream=keep)
    biases = [place.bias for place in places if place.bias is not None]
    return Watched(
        rot_q=torch.stack(queries),
        rot_k=torch.stack(keys),
        bias=torch.stack(biases) if biases else None,
        scale=blocks[0].scale,
        rotation=model.rotation,
        logits=logits,
    )


@dataclass(frozen=True)
class AtQuery:
    """What heads do at one query of each sequence.

    Attributes:
        s_pos: Positional score, ``(layers, count, heads)`` float64.
        s_sym: Symbolic score, likewise.
        entropy: Entropy of the attention weights, the query's own key included, in nats, likewise.
        use: Largest absolute contribution of each rotated plane to the logits of the keys before the query,
            ``(layers, count, heads, planes)``; no planes where nothing is rotated.
    """

    s_pos: Tensor
    s_sym: Tensor
    entropy: Tensor
    use: Tensor


def score_query(watched: Watched, query: int, rows: Tensor | None = None, *, tau: float = TAU) -> AtQuery:
    """Scores at the token ``query``, from all swaps of two keys before it.

    Args:
        watched: Queries and keys.
        query: Position of the query; two keys must come before it.
        rows: Sequences to look at, an index ``(rows,)``; all if not given.
        tau: Temperature of the weights of swaps.
    """
    q, k = watched.rot_q[..., query, :], watched.rot_k[..., : query + 1, :]
    if rows is not None:
        q, k = q[:, rows], k[:, rows]
    shape, scale, rotation = q.shape[:3], watched.scale, watched.rotation
    q, k = q.flatten(0, 2), k.flatten(0, 2)  # (pairs, d) and (pairs, query + 1, d)
    # In float64: weights enter an exponential divided by τ, and τ is small.
    logits = (k.double() @ q.double()[..., None])[..., 0] * scale
    bias: Tensor | None = None
    if watched.bias is not None:
        bias = watched.bias[:, None, :, query, : query + 1].expand(*shape, -1).flatten(0, 2)
        logits = logits + bias.double()
    weights = logits.softmax(-1)
    before = k[:, :query]
    positions = torch.arange(query, device=k.device)
    scores = score_swaps(
        QueryLogits(
            contents=before if rotation is None else rotation.unrotate(before, positions),
            placed=place(q, rotation, positions) * scale,
            logits=logits[:, :query].contiguous(),
            weights=weights[:, :query].contiguous(),
            bias=None if bias is None else bias[:, :query],
        ),
        taus=(tau,),
    )
    # The laboratory's rotations pair neighbouring dimensions, from the first on.
    turned = 0 if rotation is None else 2 * rotation.planes
    products = q[:, None, :turned] * before[..., :turned]
    use = (products[..., 0::2] + products[..., 1::2]).abs_().amax(1) * scale
    entropy = torch.special.entr(weights).sum(-1)
    return AtQuery(*(x.unflatten(0, shape) for x in (scores.s_pos[:, 0], scores.s_sym[:, 0], entropy, use)))


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

    Scores are those of ``layer_swaps``, ``frequency_use`` and ``fit_layer`` at the last token of each sequence, for all
    sequences and layers together.

    Args:
        model: The model.
        held_out: The sequences.
        path: Also score the other tokens that hops leave from.
        tau: Temperature of the weights of swaps.
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
