"""Which function each head implements, decided by what it attends to and writes on inputs the model solves.

The functions of arXiv 2605.31558: *Index* goes as many places to the left as an integer says, *Retrieval* to the pair
that a letter names, *Reflexive* stays. At a token that hops leave from, a head's attention is

* a hop, if its largest weight is on the position that the token as given names. For Retrieval, also if it is on a
  later position of the path: a pair that has taken over another's content names what that one names. Index has no such
  way: distances are from the token itself;
* a stay, if it is on the token itself, or on the answer's position at a token that holds the answer already;
* something else otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.multihop.dynamics.accuracy import solved_by
from wherewhat.multihop.dynamics.shares import wilson
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.roles.looking import Looked, look
from wherewhat.multihop.tasks import (
    IndexTask,
    LetterTask,
    NumberTask,
    PartialInductionTask,
    RetrievalTask,
    Sequences,
    Task,
)

Function = Literal["Index", "Retrieval"]
MOVES = ("hop", "stay", "else")
"""What a head does at a token: an index into this is its code."""


@dataclass(frozen=True)
class HeadRole:
    """What one head is for.

    Attributes:
        layer: Its layer.
        head: Its number in the layer.
        role: Index, Retrieval, Reflexive or other.
        hops_left: The numbers of hops left at which it makes the hop, if that is its role.
    """

    layer: int
    head: int
    role: str
    hops_left: tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """What all heads do on inputs that the model solves.

    Attributes:
        function: The hop of the task: Index or Retrieval.
        heads: One entry per head, layer by layer.
        left: Numbers of hops left.
        counts: Tokens with so many hops left, ``(left,)``.
        moves: How often a head makes each of ``MOVES`` there, ``(layers, heads, left, moves)``.
        query_counts: Last tokens with so many hops left, ``(left,)``.
        query_moves: The same at last tokens only, ``(layers, heads, left, moves)``.
        on_next: Mean attention weight on the position of the next hop, ``(layers, heads, left)``.
        on_self: Mean attention weight on the token itself, likewise.
        says: Tokens where what the head writes says the attended token, and all where it could,
            ``(layers, heads, 2)``.
        like: Tokens where what the head writes is most like the stream it attends to, and all, likewise.
        like_chance: Share that chance would find.
        solved: Share of the inputs that the model solves.
    """

    function: Function
    heads: tuple[HeadRole, ...]
    left: tuple[int, ...]
    counts: Tensor
    moves: Tensor
    query_counts: Tensor
    query_moves: Tensor
    on_next: Tensor
    on_self: Tensor
    says: Tensor
    like: Tensor
    like_chance: float
    solved: float

    @property
    def shares(self) -> Tensor:
        """Share of each move, ``(layers, heads, left, moves)`` float64."""
        return self.moves.double() / self.counts[:, None]

    @property
    def intervals(self) -> Tensor:
        """95 % intervals of the shares, ``(layers, heads, left, moves, 2)``."""
        return wilson(self.moves, self.counts[:, None])

    @property
    def says_intervals(self) -> Tensor:
        """95 % intervals of the share that says the attended token, ``(layers, heads, 2)``; NaN if none could."""
        return wilson(self.says[..., 0], self.says[..., 1])

    @property
    def like_intervals(self) -> Tensor:
        """95 % intervals of the share that is most like the attended stream, ``(layers, heads, 2)``."""
        return wilson(self.like[..., 0], self.like[..., 1])


def hop_function(task: Task) -> Function:
    """The function that makes one hop of a task.

    Raises:
        ConfigError: If it is none of the known tasks.
    """
    if isinstance(task, NumberTask | IndexTask):
        return "Index"
    if isinstance(task, LetterTask | RetrievalTask | PartialInductionTask):
        return "Retrieval"
    raise ConfigError(f"the hops of a {type(task).__name__} are no known function: use a number or letter task")


def find_roles(model: LabModel, task: Task, sequences: Sequences, *, threshold: float = 0.5) -> Roles:
    """Which function each head implements.

    A head has the role of the task's hop if it makes the hop at most tokens with some number of hops left (the lower
    end of the 95 % interval reaches ``threshold``), Reflexive if it stays at most tokens of all, and else "other".

    Args:
        model: The model.
        task: Its task.
        sequences: Questions; those that it does not answer right are left out.
        threshold: Share of tokens that makes a role.

    Raises:
        ConfigError: If the threshold makes no sense, or the task's hops are no known function.
        MeasureError: If the model solves none.
    """
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold is {threshold}: give a number between 0 and 1")
    function = hop_function(task)
    solved = solved_by(model, sequences)
    if not bool(solved.any()):
        raise MeasureError(f"the model solves none of {len(sequences)} inputs: there are no roles to find yet")
    looked = look(model, sequences.select(solved.nonzero()[:, 0]), answers=task.answers)
    tokens = looked.tokens
    left = tuple(sorted(set(tokens.left.tolist())))
    move = classify(looked, function)
    every = (tokens.left[:, None] == torch.tensor(left)).double()  # (tokens, left)
    last = every * tokens.at_query[:, None]
    moves, query_moves = (torch.stack([(move == m).double() @ w for m in range(3)], -1).long() for w in (every, last))
    counts = every.sum(0)
    says, can = looked.says_attended.sum(-1), looked.can_say.sum(-1)
    like = looked.like_attended.sum(-1)
    return Roles(
        function=function,
        heads=_name(moves, counts.long(), left, function, threshold),
        left=left,
        counts=counts.long(),
        moves=moves,
        query_counts=last.sum(0).long(),
        query_moves=query_moves,
        on_next=looked.on_next.double() @ every / counts,
        on_self=looked.on_self.double() @ every / counts,
        says=torch.stack([says, can], -1),
        like=torch.stack([like, torch.full_like(like, len(tokens))], -1),
        like_chance=float((1 / looked.seen).mean()),
        solved=float(solved.double().mean()),
    )


def classify(looked: Looked, function: Function) -> Tensor:
    """What each head does at each token, a code of ``MOVES``, ``(layers, heads, tokens)``."""
    tokens, attended = looked.tokens, looked.attended
    at_answer = attended == tokens.answer
    stays = (attended == tokens.position) | (at_answer & looked.holds[:, None])
    ahead = tokens.ahead if function == "Retrieval" else tokens.ahead[:, :1]
    hops = (attended[..., None] == ahead).any(-1)
    code = torch.full_like(attended, MOVES.index("else"))
    code[hops] = MOVES.index("hop")
    code[stays] = MOVES.index("stay")
    return code


def _name(
    moves: Tensor, counts: Tensor, left: tuple[int, ...], function: Function, threshold: float
) -> tuple[HeadRole, ...]:
    hop = wilson(moves[..., MOVES.index("hop")], counts)[..., 0] >= threshold  # (layers, heads, left)
    stay = wilson(moves[..., MOVES.index("stay")].sum(-1), counts.sum())[..., 0] >= threshold
    found = []
    for layer, head in torch.ones_like(stay).nonzero().tolist():
        hops_left = tuple(number for number, made in zip(left, hop[layer, head].tolist(), strict=True) if made)
        role = function if hops_left else "Reflexive" if bool(stay[layer, head]) else "other"
        found.append(HeadRole(layer, head, role, hops_left))
    return tuple(found)
