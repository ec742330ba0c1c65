"""Which function each head implements, and how its ablation and patching change the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.tensors import share_intervals
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import map_batches, solved_by
from wherewhat_lab.tasks.multi_hop import IntegerTask, PairTask
from wherewhat_lab.tasks.task import Sequences, SequenceTask


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
    """Return the attention of every head at every source token of a hop, on questions that the model solves."""
    device = model.embedding.device

    def run(rows: slice) -> tuple[Tensor, ...]:
        part = sequences.select(torch.arange(rows.start, rows.stop))
        tokens = path_tokens(part)
        row, position, reached = (x.to(device) for x in (tokens.row, tokens.position, tokens.next))
        streams: list[Tensor] = []
        layers: list[LayerAttention] = []
        model(
            part.tokens.to(device),
            edit_stream=lambda layer, stream: streams.append(stream),
            edit_attention=layers.append,
        )
        right = part.answers.to(device)[row, None]
        by_layer = []
        for attention, stream in zip(layers, streams, strict=False):
            weights = attention.pattern()[row, :, position]  # (tokens, heads, n)
            on_next, on_self = (
                weights.gather(2, where[:, None, None].expand(-1, weights.shape[1], 1))[..., 0].T
                for where in (reached, position)
            )
            logits = model.head(model.norm(stream[row, position]))
            holds = logits.gather(-1, right)[:, 0] > logits.scatter(-1, right, -torch.inf).amax(-1)
            by_layer.append((weights.argmax(-1).T, on_next, on_self, holds))
        return tuple(torch.stack(parts) for parts in zip(*by_layer, strict=True))

    batches = map_batches(run, len(sequences), sequences.tokens.shape[1], model)
    return PathAttention(path_tokens(sequences), *(torch.cat(parts, -1).cpu() for parts in zip(*batches, strict=True)))


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
    if isinstance(task, IntegerTask):
        return "Index"
    if isinstance(task, PairTask):
        return "Retrieval"
    raise ConfigError(f"the hops of a {type(task).__name__} are no known function: use a number or letter task")


def find_roles(model: LabModel, task: SequenceTask, sequences: Sequences) -> Roles:
    """Return which function each head implements.

    A head has the role of the task's hop if it makes the hop at most tokens with some number of hops left (the lower
    end of the 95 % interval reaches 1/2), Reflexive if it stays at most tokens of all, and else "other".

    Args:
        model: The model.
        task: Its task.
        sequences: Questions; those that it does not answer correctly are left out.
    """
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
        heads=_name_heads(moves, counts.long(), left, function),
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


def _name_heads(moves: Tensor, counts: Tensor, left: tuple[int, ...], function: Function) -> tuple[HeadRole, ...]:
    hop = share_intervals(moves[..., MOVES.index("hop")], counts)[..., 0] >= 0.5  # (layers, heads, left)
    stay = share_intervals(moves[..., MOVES.index("stay")].sum(-1), counts.sum())[..., 0] >= 0.5
    roles = []
    for layer, head in torch.ones_like(stay).nonzero().tolist():
        hops_left = tuple(number for number, hops in zip(left, hop[layer, head].tolist(), strict=True) if hops)
        role = function if hops_left else "Reflexive" if bool(stay[layer, head]) else "other"
        roles.append(HeadRole(layer, head, role, hops_left))
    return tuple(roles)


def other_sequences(sequences: Sequences) -> Sequences:
    """Return, for each sequence, another one of them with the same number of hops and another answer."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.empty_like(sequences.hops)
    relabelled = torch.randperm(int(sequences.answers.max()) + 1, generator=generator)
    for hops in sequences.hop_numbers:
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        # Sorted by answer, a row and the row half the list later differ unless one answer has more than half.
        rows = rows[relabelled[sequences.answers[rows]].argsort(stable=True)]
        chosen[rows] = rows.roll(-(len(rows) // 2))
    if bool((sequences.answers == sequences.answers[chosen]).any()):
        raise ConfigError(
            f"{len(sequences)} sequences are too few, or too alike, to give each another one with as many hops and "
            "another answer: give more"
        )
    return sequences.select(chosen)


def ablate_heads(model: LabModel, sequences: Sequences) -> Tensor:
    """Return the change of accuracy without each head in turn, by number of hops, ``(layers, heads, hops)``.

    It is negative where the head is needed. At all tokens the head's output is replaced by its mean at the same
    position over these sequences.
    """
    count, n = sequences.tokens.shape
    device = model.embedding.device
    sums = map_batches(lambda rows: _outputs(model, sequences.tokens[rows].to(device)).sum(1), count, n, model)
    means = torch.stack(sums).sum(0) / count  # (layers, n, heads, d)

    def run(rows: slice) -> Tensor:
        answers = sequences.answers[rows].to(device)
        return (_answers_without(model, sequences.tokens[rows].to(device), means[:, None]) == answers).cpu()

    after = torch.cat(map_batches(run, count, n, model), -1).double()
    return _mean_by_hops(after - solved_by(model, sequences).double(), sequences)


def patch_heads(model: LabModel, sequences: Sequences, sources: Sequences) -> Tensor:
    """Return the share of answers that follow a head's output taken from another input, ``(layers, heads, hops)``.

    The output is replaced at all tokens. Only pairs count of which the model solves both, and whose answers differ.

    Args:
        model: The model.
        sequences: The questions.
        sources: The other inputs, one for each question; see :func:`other_sequences`.
    """
    if sequences.tokens.shape != sources.tokens.shape:
        raise ConfigError(
            f"sources {tuple(sources.tokens.shape)} must be as many and as long as sequences "
            f"{tuple(sequences.tokens.shape)}"
        )
    usable = solved_by(model, sequences) & solved_by(model, sources) & (sequences.answers != sources.answers)
    if not bool(usable.any()):
        raise MeasureError(f"none of {len(sequences)} pairs of inputs is solved: there is nothing to patch yet")
    sequences, sources = (x.select(usable.nonzero()[:, 0]) for x in (sequences, sources))
    device = model.embedding.device

    def run(rows: slice) -> Tensor:
        outputs = _outputs(model, sources.tokens[rows].to(device))
        answers = _answers_without(model, sequences.tokens[rows].to(device), outputs)
        return (answers == sources.answers[rows].to(device)).cpu()

    count, n = sequences.tokens.shape
    return _mean_by_hops(torch.cat(map_batches(run, count, n, model), -1).double(), sequences)


def _mean_by_hops(values: Tensor, sequences: Sequences) -> Tensor:
    """Return the mean of ``(..., count)`` over the questions of each number of hops, ``(..., hops)``."""
    which = (sequences.hops[:, None] == torch.tensor(sequences.hop_numbers)).double()
    return values @ which / which.sum(0)


def _answers_without(model: LabModel, tokens: Tensor, outputs: Tensor) -> Tensor:
    """Return the answers with each head's output in turn replaced, ``(layers, heads, batch)``.

    Args:
        model: The model.
        tokens: Inputs, ``(batch, n)``.
        outputs: Replacements of all heads' outputs, ``(layers, batch or 1, n, heads, d)``.
    """

    def answers(layer: int, head: int) -> Tensor:
        def edit(attention: LayerAttention) -> Tensor | None:
            if attention.layer != layer:
                return None
            changed = attention.output.clone()
            changed[:, :, head] = outputs[layer, :, :, head]
            return changed

        logits: Tensor = model(tokens, edit_attention=edit)
        return logits.argmax(-1)

    layers, heads = range(model.config.layers), range(model.config.heads)
    return torch.stack([torch.stack([answers(layer, head) for head in heads]) for layer in layers])


def _outputs(model: LabModel, tokens: Tensor) -> Tensor:
    """Return the heads' outputs before the output projection, ``(layers, batch, n, heads, d)``."""
    return torch.stack([layer.output for layer in model.attention(tokens)])
