"""What heads attend to and write at the tokens of the hop path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.capturing.attention import LayerAttention
from wherewhat.multihop.block import Block
from wherewhat.multihop.dynamics.parts import in_parts, rows_in_parts
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.roles.path_tokens import PathTokens, path_tokens
from wherewhat.multihop.tasks import Sequences


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
