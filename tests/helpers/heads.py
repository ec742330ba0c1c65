"""Heads with known labels, built from queries and keys."""

from __future__ import annotations

import torch

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation

N, D = 96, 32
"""Tokens, and dimensions of a head: the first half is rotated."""

FREQUENCIES = torch.logspace(0, -2, D // 4)
ROTATION = Rotation("interleaved", 0, FREQUENCIES, 1.0)

LABELS_OF = {
    "sink": ("symbolic", "sink"),
    "previous": ("positional", "positional"),
    "content": ("symbolic", "symbolic"),
    "both": ("mixed", "mixed"),
    "even": ("uniform", "uniform"),
    "sink, else previous": ("symbolic", "sink"),
    "below a sink, else near": ("symbolic", "positional"),
}
"""Label from the scores of all keys, and with sinks apart, by name of a constructed head."""


def constructed_heads(*, n: int = N, seed: int = 0) -> LayerAttention:
    """A layer with one head for each name in :data:`LABELS_OF`, in that order.

    Rotated dimensions hold the distance: logits are largest at distance 1. The others hold contents, at random, and in
    the last one the first key differs from all others.
    """
    generator = torch.Generator().manual_seed(seed)
    contents = torch.nn.functional.normalize(torch.randn(n, D // 2 - 1, generator=generator), dim=-1)
    wanted = torch.nn.functional.normalize(torch.randn(n, D // 2 - 1, generator=generator), dim=-1)
    before = torch.polar(torch.ones(D // 4), -FREQUENCIES)  # a query that is rotated back by one token
    k = torch.zeros(n, D)
    k[:, 0 : D // 2 : 2] = 1.0
    k[:, D // 2 : -1] = contents
    k[0, -1] = 1.0

    def queries(*, previous: float = 0.0, content: float = 0.0, first: float = 0.0) -> torch.Tensor:
        q = torch.zeros(n, D)
        q[:, 0 : D // 2 : 2], q[:, 1 : D // 2 : 2] = previous * before.real, previous * before.imag
        q[:, D // 2 : -1] = content * wanted
        q[:, -1] = first
        return q

    heads = {
        "sink": queries(first=12.0),
        "previous": queries(previous=40.0),
        "content": queries(content=40.0),
        "both": queries(previous=2.0, content=20.0),
        "even": queries(),
        "sink, else previous": queries(previous=40.0),
        "below a sink, else near": queries(previous=0.5),
    }
    q = torch.stack([heads[name] for name in LABELS_OF])
    keys = k.expand(len(q), n, D).clone()
    where = torch.arange(n)
    rot_q, rot_k = (ROTATION.rotate(x, where) for x in (q, keys))
    logits = rot_q @ rot_k.mT
    for head, share in ((-2, 0.6), (-1, 0.3)):  # the first key's logit that gives it this share of the attention
        others = logits[head].masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)[:, 1:].logsumexp(-1)
        rot_q[head, 1:, -1] = (others + torch.tensor(share / (1 - share)).log() - logits[head, :, 0])[1:]
    empty = torch.zeros(1, len(q), n, 0)
    return LayerAttention(
        layer=0,
        name="constructed",
        rot_q=rot_q[None],
        rot_k=rot_k[None],
        value=empty,
        output=empty.transpose(1, 2),
        scale=1.0,
        mask=Mask(causal=True),
        rotation=ROTATION,
        positions=where,
    )


class ConstructedSubject:
    """The constructed layer as measurements see a model; contents depend on the text."""

    def run(self, ids, reducer, *, logits=False):
        reducer(constructed_heads(n=ids.shape[1], seed=int(ids[0, 0])))

    def key_mixing(self):
        return {}
