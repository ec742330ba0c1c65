"""How information flows on one input: which positions, and which edges of attention, matter in which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lab.model import Edit, LabModel
from wherewhat.lab.multihop.accuracy import in_parts, rows_in_parts


@dataclass(frozen=True)
class Flow:
    """Where the answer's identity is, layer by layer.

    Attributes:
        effect: Drop of (logit of the answer - logit of the donor's answer) if the stream that enters a layer is, at one
            position, taken from the donor, ``(layers + 1, n)``; the last row is the stream that leaves the last layer.
        clean: That difference without a change.
        donor: That difference on the donor.
    """

    effect: Tensor
    clean: float
    donor: float

    @property
    def share(self) -> Tensor:
        """Effects as shares of that of all positions together, ``(layers + 1, n)``: 1 where everything passes."""
        return self.effect / (self.clean - self.donor)


def patch_flow(model: LabModel, tokens: Tensor, donor: Tensor, *, answer: int, donor_answer: int) -> Flow:
    """Patch the stream of every layer and position from another input.

    With a donor that differs in the answer's token alone (see ``other_answers``) the picture shows how that token comes
    to the query.

    Args:
        model: The model.
        tokens: The input, ``(n,)``.
        donor: The other one, ``(n,)``.
        answer: Token id of the input's answer.
        donor_answer: Token id of the donor's.
    """
    if tokens.ndim != 1 or tokens.shape != donor.shape:
        raise ConfigError(f"input {tuple(tokens.shape)} and donor {tuple(donor.shape)} must both be (n,)")
    device = model.embedding.device
    both = torch.stack([tokens, donor]).to(device)
    streams: list[Tensor] = []
    with torch.no_grad():
        logits = model(both, edit_stream=lambda layer, stream: streams.append(stream)).double().cpu()
    clean, other = (logits[:, answer] - logits[:, donor_answer]).tolist()
    if not clean > other:
        raise MeasureError("the model's answers to the two inputs do not differ: choose inputs that it solves")
    changed = _sweep_streams(model, both[0], torch.stack(streams)[:, 1])
    effect = clean - (changed[..., answer] - changed[..., donor_answer])
    return Flow(effect, clean, other)


def ablation_flow(model: LabModel, tokens: Tensor, reference: Tensor, *, answer: int) -> Tensor:
    """Drop of the answer's logit, over the mean of all, if the stream at one position is an average one.

    Args:
        model: The model.
        tokens: The input, ``(n,)``.
        reference: Inputs to take the mean stream of each layer and position over, ``(count, n)``.
        answer: Token id of the answer.

    Returns:
        ``(layers + 1, n)`` float64: unlike :func:`patch_flow`, also what is needed to find the way shows up.
    """
    if tokens.ndim != 1 or reference.ndim != 2 or reference.shape[1:] != tokens.shape:
        raise ConfigError(
            f"input {tuple(tokens.shape)} and reference {tuple(reference.shape)} must be (n,), (count, n)"
        )
    device, n = model.embedding.device, len(tokens)
    model.places(n)

    def total(rows: slice) -> Tensor:
        sums: list[Tensor] = []
        model(reference[rows].to(device), edit_stream=lambda layer, stream: sums.append(stream.sum(0)))
        return torch.stack(sums)

    parts = in_parts(total, rows_in_parts(len(reference), n, device), device)
    changed = _sweep_streams(model, tokens.to(device), torch.stack(parts).sum(0) / len(reference))
    return _clean(model, tokens, answer) - _above_mean(changed, answer)


def edge_flow(model: LabModel, tokens: Tensor, *, answer: int) -> Tensor:
    """Drop of the answer's logit, over the mean of all, if one query of a head may not see one key.

    The other keys' weights grow in proportion, as if the key had been masked.

    Args:
        model: The model.
        tokens: The input, ``(n,)``.
        answer: Token id of the answer.

    Returns:
        ``(layers, heads, n, n)`` float64 by query and key; NaN where there is no edge, and for the first token, which
        has nothing else to see.
    """
    device, n, heads = model.embedding.device, len(tokens), model.config.heads
    ids = tokens[None].to(device)
    layers = model.attention(ids)
    query, key = torch.tril_indices(n, n, device=device)
    query, key = query[query > 0], key[query > 0]
    # (layers, heads, edges, d): what the head gives its query without the key.
    outputs = []
    for attention in layers:
        scores = (
            attention.attn_scores()[0].double()[:, query].masked_fill(~attention.visible()[0, 0, query], -torch.inf)
        )
        scores[:, torch.arange(len(key)), key] = -torch.inf
        outputs.append(scores.softmax(-1) @ attention.value[0].double())
    instead = torch.stack(outputs).to(ids.device, model.embedding.dtype)
    shape = instead.shape[:3]
    which = torch.cartesian_prod(*(torch.arange(size, device=device) for size in shape))  # rows: layer, head, edge

    def make(rows: slice) -> dict[str, Edit]:
        layer, head, edge = which[rows].unbind(-1)

        def edit(index: int, attended: Tensor) -> Tensor:
            some = (layer == index).nonzero()[:, 0]
            changed = attended.clone()
            changed[some, query[edge[some]], head[some]] = instead[index, head[some], edge[some]]
            return changed

        return {"edit": edit}

    changed = _above_mean(_sweep(model, ids[0], len(which), make), answer)
    found = torch.full((shape[0], heads, n, n), torch.nan, dtype=torch.float64)
    found[:, :, query.cpu(), key.cpu()] = (_clean(model, tokens, answer) - changed).view(shape)
    return found


def _sweep_streams(model: LabModel, tokens: Tensor, instead: Tensor) -> Tensor:
    """Logits ``(layers + 1, n, vocabulary)`` with the stream of one layer and position from ``instead``.

    Args:
        model: The model.
        tokens: The input, ``(n,)``.
        instead: Streams, ``(layers + 1, n, width)``.
    """
    layers, n = instead.shape[:2]
    which = torch.cartesian_prod(torch.arange(layers), torch.arange(n)).to(instead.device)

    def make(rows: slice) -> dict[str, Edit]:
        layer, position = which[rows].unbind(-1)

        def edit(index: int, stream: Tensor) -> Tensor:
            some = (layer == index).nonzero()[:, 0]
            changed = stream.clone()
            changed[some, position[some]] = instead[index, position[some]]
            return changed

        return {"edit_stream": edit}

    return _sweep(model, tokens, len(which), make).view(layers, n, -1)


def _sweep(model: LabModel, tokens: Tensor, count: int, make: Callable[[slice], dict[str, Edit]]) -> Tensor:
    """Logits ``(count, vocabulary)`` float64 of one input under many edits, each its own row of a batch."""
    n, device = len(tokens), tokens.device
    model.places(n)  # once, before threads ask for it

    def run(rows: slice) -> Tensor:
        batch = tokens.expand(rows.stop - rows.start, n)
        logits: Tensor = model(batch, **make(rows))
        return logits.double().cpu()

    return torch.cat(in_parts(run, rows_in_parts(count, n, device), device))


@torch.no_grad()
def _clean(model: LabModel, tokens: Tensor, answer: int) -> float:
    return float(_above_mean(model(tokens[None].to(model.embedding.device)).double(), answer))


def _above_mean(logits: Tensor, answer: int) -> Tensor:
    return logits[..., answer] - logits.mean(-1)
