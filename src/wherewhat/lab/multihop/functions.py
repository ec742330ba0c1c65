"""Which function each head implements, from what it attends to and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.block import Block
from wherewhat.lab.intervals import wilson
from wherewhat.lab.model import LabModel
from wherewhat.lab.multihop.accuracy import in_parts, rows_in_parts, solved_by
from wherewhat.lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat.lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask
from wherewhat.lab.tasks.task import Sequences, Task


@dataclass(frozen=True)
class PathTokens:
    """The tokens that hops leave from, of all sequences together.

    Attributes:
        row: Sequence of each, ``(tokens,)``.
        position: Its position, likewise.
        left: Hops from there to the answer, likewise; at the last token of a sequence all of its hops.
        at_query: Whether it is the last token of its sequence.
        ahead: Positions that hops from there reach, the next one first and the answer's last, -1 after it,
            ``(tokens, max_hops)``.
    """

    row: Tensor
    position: Tensor
    left: Tensor
    at_query: Tensor
    ahead: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def next(self) -> Tensor:
        """Where the next hop leads, ``(tokens,)``."""
        return self.ahead[:, 0]

    @property
    def answer(self) -> Tensor:
        """Where the answer stands, ``(tokens,)``."""
        return self.ahead.gather(1, self.left[:, None] - 1)[:, 0]


def path_tokens(sequences: Sequences) -> PathTokens:
    """The tokens that hops leave from: a path without its end, which is the answer."""
    path = sequences.path
    steps = torch.arange(path.shape[1])
    row, step = (steps < sequences.hops[:, None]).nonzero(as_tuple=True)
    columns = step[:, None] + 1 + torch.arange(path.shape[1] - 1)
    padded = torch.cat([path, torch.full_like(path, -1)], 1)
    return PathTokens(
        row=row,
        position=path[row, step],
        left=sequences.hops[row] - step,
        at_query=step == 0,
        ahead=padded[row[:, None], columns],
    )


@dataclass(frozen=True)
class Looked:
    """Heads at the tokens of the hop path, in the order of :class:`PathTokens`; everything is on the CPU.

    Attributes:
        tokens: The tokens.
        seen: Positions they see, ``(tokens,)``: chance finds the attended one once in so many.
        attended: Position of the largest attention weight, ``(layers, heads, tokens)`` int64.
        on_next: Attention weight on the position of the next hop, ``(layers, heads, tokens)``.
        on_self: Attention weight on the token itself, likewise.
        holds: Whether the stream that enters the layer, read with the output, says the answer, ``(layers, tokens)``.
        says_attended: Whether what the head writes, read with the output, says the attended token, among all that can
            be answers, ``(layers, heads, tokens)``; False where the attended token cannot be one.
        can_say: Whether the attended token can be an answer, likewise.
        like_attended: Whether what the head writes is more like the stream at the attended position than like that at
            any other position seen, likewise.
    """

    tokens: PathTokens
    seen: Tensor
    attended: Tensor
    on_next: Tensor
    on_self: Tensor
    holds: Tensor
    says_attended: Tensor
    can_say: Tensor
    like_attended: Tensor


def look(model: LabModel, sequences: Sequences, *, answers: int) -> Looked:
    """Look at every head at every token of the hop path.

    Args:
        model: The model.
        sequences: The questions; give those that it answers right.
        answers: Number of tokens that can be answers; their ids come first.
    """
    device, n = model.embedding.device, sequences.tokens.shape[1]
    model.places(n)  # once, before threads ask for it

    def run(rows: slice) -> tuple[Tensor, ...]:
        return _look(model, sequences.select(torch.arange(rows.start, rows.stop)), answers)

    found = in_parts(run, rows_in_parts(len(sequences), n, device), device)
    parts = [torch.cat(listed, -1).cpu() for listed in zip(*found, strict=True)]
    tokens = path_tokens(sequences)
    return Looked(tokens, tokens.position + 1, *parts)


def _look(model: LabModel, sequences: Sequences, answers: int) -> tuple[Tensor, ...]:
    """Everything of :class:`Looked` but the tokens."""
    device = model.embedding.device
    tokens = path_tokens(sequences)
    ids = sequences.tokens.to(device)
    row, position = tokens.row.to(device), tokens.position.to(device)
    streams: list[Tensor] = []
    model(ids, edit_stream=lambda layer, stream: streams.append(stream))
    right = sequences.answers.to(device)[row]
    found = []
    for block, attention, stream in zip(model.blocks, model.attention(ids), streams, strict=False):
        assert isinstance(block, Block)
        weights = attention.pattern()[row, :, position]  # (tokens, heads, n)
        attended = weights.argmax(-1).T  # (heads, tokens)
        on_next, on_self = (
            weights.gather(2, where.to(device)[:, None, None].expand(-1, weights.shape[1], 1))[..., 0].T
            for where in (tokens.next, tokens.position)
        )
        holds = _is_largest(model.head(model.norm(stream[row, position])), right)
        written = _written(block, attention)[:, row, position]  # (heads, tokens, width)
        named = ids[row].gather(1, attended.T).T
        can_say = named < answers
        says = _is_largest(_push(model, written, answers), named) & can_say
        like = _most_alike(written, stream[row], position) == attended
        found.append((attended, on_next, on_self, holds, says, can_say, like))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def _written(block: Block, attention: LayerAttention) -> Tensor:
    """What each head adds to the stream, ``(heads, batch, n, width)``."""
    heads, d = attention.output.shape[2:]
    by_head = block.out.weight.view(-1, heads, d)  # (width, heads, d)
    return torch.einsum("bnhd,whd->hbnw", attention.output, by_head)


def _push(model: LabModel, written: Tensor, answers: int) -> Tensor:
    """What a part of the stream ``(..., width)`` adds to the logits of possible answers, up to a factor."""
    if isinstance(model.norm, nn.LayerNorm):
        written = written - written.mean(-1, keepdim=True)
    if isinstance(model.norm, nn.LayerNorm | nn.RMSNorm):
        written = written * model.norm.weight
    return functional.linear(written, model.head.weight[:answers])


def _is_largest(logits: Tensor, token: Tensor) -> Tensor:
    """Whether a token ``(...)`` has a larger logit than any other, of ``(..., tokens)``."""
    wanted = token.clamp_max(logits.shape[-1] - 1)[..., None]
    others = logits.scatter(-1, wanted, -torch.inf).amax(-1)
    return logits.gather(-1, wanted)[..., 0] > others


def _most_alike(written: Tensor, streams: Tensor, position: Tensor) -> Tensor:
    """Position up to ``position`` whose stream is most like what was written, ``(heads, tokens)``.

    By cosine, after taking away what the streams that are seen have in common.

    Args:
        written: What heads write, ``(heads, tokens, width)``.
        streams: Streams of each token's sequence, ``(tokens, n, width)``.
        position: Positions of the tokens, ``(tokens,)``.
    """
    seen = torch.arange(streams.shape[1], device=streams.device) <= position[:, None]
    mean = (streams * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None]
    centred = functional.normalize(streams - mean, dim=-1)
    alike = torch.einsum("htw,tnw->htn", written, centred)
    return alike.masked_fill(~seen, -torch.inf).argmax(-1)


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
    """The function that makes one hop of a task."""
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
