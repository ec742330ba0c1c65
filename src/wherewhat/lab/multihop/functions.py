"""Which function each head implements, from what it attends to at the tokens of the path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import map_batches, solved_by
from wherewhat.lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat.lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask
from wherewhat.lab.tasks.task import Sequences, SequenceTask
from wherewhat.measures.tensors import share_intervals


@dataclass(frozen=True)
class PathTokens:
    """Source tokens of hops, of all sequences together.

    Attributes:
        row: Sequence of each token, ``(tokens,)``.
        position: Position of each token, ``(tokens,)``.
        left: Hops from the token to the answer, ``(tokens,)``; at the last token of a sequence all of its hops.
        ahead: Positions that hops from the token reach, from the next one to the answer's, then -1,
            ``(tokens, max_hops)``.
    """

    row: Tensor
    position: Tensor
    left: Tensor
    ahead: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def next(self) -> Tensor:
        """Position of the next hop, ``(tokens,)``."""
        return self.ahead[:, 0]

    @property
    def answer(self) -> Tensor:
        """Position of the answer, ``(tokens,)``."""
        return self.ahead.gather(1, self.left[:, None] - 1)[:, 0]


def path_tokens(sequences: Sequences) -> PathTokens:
    """Return the source tokens of hops: the path without its end, which is the answer."""
    path = sequences.path
    steps = torch.arange(path.shape[1])
    row, step = (steps < sequences.hops[:, None]).nonzero(as_tuple=True)
    columns = step[:, None] + 1 + torch.arange(path.shape[1] - 1)
    padded = torch.cat([path, torch.full_like(path, -1)], 1)
    return PathTokens(
        row=row,
        position=path[row, step],
        left=sequences.hops[row] - step,
        ahead=padded[row[:, None], columns],
    )


@dataclass(frozen=True)
class PathAttention:
    """Attention of all heads at the source tokens of hops, in the order of :class:`PathTokens`, on the CPU.

    Attributes:
        tokens: The tokens.
        attended: Position of the largest attention weight, ``(layers, heads, tokens)`` int64.
        on_next: Attention weight on the position of the next hop, ``(layers, heads, tokens)``.
        on_self: Attention weight on the token itself, ``(layers, heads, tokens)``.
        holds: Whether the output applied to the layer's input predicts the answer (logit lens), ``(layers, tokens)``.
    """

    tokens: PathTokens
    attended: Tensor
    on_next: Tensor
    on_self: Tensor
    holds: Tensor


def path_attention(model: LabModel, sequences: Sequences) -> PathAttention:
    """Return the attention of every head at every source token of a hop.

    Args:
        model: The model.
        sequences: Questions that it answers correctly.
    """

    def run(rows: slice) -> tuple[Tensor, ...]:
        return _path_attention(model, sequences.select(torch.arange(rows.start, rows.stop)))

    found = map_batches(run, len(sequences), sequences.tokens.shape[1], model)
    parts = [torch.cat(listed, -1).cpu() for listed in zip(*found, strict=True)]
    return PathAttention(path_tokens(sequences), *parts)


def _path_attention(model: LabModel, sequences: Sequences) -> tuple[Tensor, ...]:
    """Return all of :class:`PathAttention` but the tokens."""
    device = model.embedding.device
    tokens = path_tokens(sequences)
    ids = sequences.tokens.to(device)
    row, position = tokens.row.to(device), tokens.position.to(device)
    streams: list[Tensor] = []
    model(ids, edit_stream=lambda layer, stream: streams.append(stream))
    right = sequences.answers.to(device)[row]
    found = []
    for attention, stream in zip(model.attention(ids), streams, strict=False):
        weights = attention.pattern()[row, :, position]  # (tokens, heads, n)
        on_next, on_self = (
            weights.gather(2, where.to(device)[:, None, None].expand(-1, weights.shape[1], 1))[..., 0].T
            for where in (tokens.next, tokens.position)
        )
        logits = model.head(model.norm(stream[row, position]))
        others = logits.scatter(-1, right[:, None], -torch.inf).amax(-1)
        holds = logits.gather(-1, right[:, None])[:, 0] > others
        found.append((weights.argmax(-1).T, on_next, on_self, holds))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


Function = Literal["Index", "Retrieval"]
MOVES = ("hop", "stay", "else")
"""Kinds of attention at a token; their codes are indices into this tuple."""


@dataclass(frozen=True)
class HeadRole:
    """The role of one head.

    Attributes:
        layer: Its layer.
        head: Its index in the layer.
        role: Index, Retrieval, Reflexive or other.
        hops_left: The numbers of hops left at which it makes the hop, if that is its role.
    """

    layer: int
    head: int
    role: str
    hops_left: tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """Roles of all heads on inputs that the model solves.

    Attributes:
        function: The hop of the task: Index or Retrieval.
        heads: One entry per head, layer by layer.
        left: Numbers of hops left.
        counts: Tokens with that number of hops left, ``(left,)``.
        moves: How often a head makes each of ``MOVES`` there, ``(layers, heads, left, moves)``.
        on_next: Mean attention weight on the position of the next hop, ``(layers, heads, left)``.
        on_self: Mean attention weight on the token itself, ``(layers, heads, left)``.
        solved: Share of the inputs that the model solves.
    """

    function: Function
    heads: tuple[HeadRole, ...]
    left: tuple[int, ...]
    counts: Tensor
    moves: Tensor
    on_next: Tensor
    on_self: Tensor
    solved: float

    @property
    def shares(self) -> Tensor:
        """Share of each move, ``(layers, heads, left, moves)`` float64."""
        return self.moves.double() / self.counts[:, None]


def hop_function(task: SequenceTask) -> Function:
    """Return the function that makes one hop of a task."""
    if isinstance(task, NumberTask | IndexTask):
        return "Index"
    if isinstance(task, LetterTask | RetrievalTask | PartialInductionTask):
        return "Retrieval"
    raise ConfigError(f"the hops of a {type(task).__name__} are no known function: use a number or letter task")


def find_roles(model: LabModel, task: SequenceTask, sequences: Sequences, *, threshold: float = 0.5) -> Roles:
    """Return which function each head implements.

    A head has the role of the task's hop if it makes the hop at most tokens with some number of hops left (the lower
    end of the 95 % interval reaches ``threshold``), Reflexive if it stays at most tokens of all, and else "other".

    Args:
        model: The model.
        task: Its task.
        sequences: Questions; those that it does not answer correctly are left out.
        threshold: Share of tokens that defines a role.
    """
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold is {threshold}: give a number between 0 and 1")
    function = hop_function(task)
    solved = solved_by(model, sequences)
    if not bool(solved.any()):
        raise MeasureError(f"the model solves none of {len(sequences)} inputs: there are no roles to find yet")
    attention = path_attention(model, sequences.select(solved.nonzero()[:, 0]))
    tokens = attention.tokens
    left = tuple(sorted(set(tokens.left.tolist())))
    move = classify(attention, function)
    every = (tokens.left[:, None] == torch.tensor(left)).double()  # (tokens, left)
    moves = torch.stack([(move == code).double() @ every for code in range(len(MOVES))], -1).long()
    counts = every.sum(0)
    return Roles(
        function=function,
        heads=_name(moves, counts.long(), left, function, threshold),
        left=left,
        counts=counts.long(),
        moves=moves,
        on_next=attention.on_next.double() @ every / counts,
        on_self=attention.on_self.double() @ every / counts,
        solved=float(solved.double().mean()),
    )


def classify(attention: PathAttention, function: Function) -> Tensor:
    """Return the code in ``MOVES`` of each head at each token, ``(layers, heads, tokens)``."""
    tokens, attended = attention.tokens, attention.attended
    at_answer = attended == tokens.answer
    stays = (attended == tokens.position) | (at_answer & attention.holds[:, None])
    ahead = tokens.ahead if function == "Retrieval" else tokens.ahead[:, :1]
    hops = (attended[..., None] == ahead).any(-1)
    code = torch.full_like(attended, MOVES.index("else"))
    code[hops] = MOVES.index("hop")
    code[stays] = MOVES.index("stay")
    return code


def _name(
    moves: Tensor, counts: Tensor, left: tuple[int, ...], function: Function, threshold: float
) -> tuple[HeadRole, ...]:
    hop = share_intervals(moves[..., MOVES.index("hop")], counts)[..., 0] >= threshold  # (layers, heads, left)
    stay = share_intervals(moves[..., MOVES.index("stay")].sum(-1), counts.sum())[..., 0] >= threshold
    found = []
    for layer, head in torch.ones_like(stay).nonzero().tolist():
        hops_left = tuple(number for number, made in zip(left, hop[layer, head].tolist(), strict=True) if made)
        role = function if hops_left else "Reflexive" if bool(stay[layer, head]) else "other"
        found.append(HeadRole(layer, head, role, hops_left))
    return tuple(found)
