"""Heads with known labels, built from queries and keys."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


WIDTH, VOCABULARY = 16, 64
"""Dimensions of a head, and tokens, of a constructed model."""


def constructed_model(*kinds: str, seed: int = 0) -> LlamaForCausalLM:
    """A model of one layer whose heads attend as named: positional, symbolic, sink, uniform, or noise (untrained)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=WIDTH * len(kinds),
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=len(kinds),
        head_dim=WIDTH,
        vocab_size=VOCABULARY,
        rope_theta=1e6,
        max_position_embeddings=128,
        # Of the untrained model: with 0.02 all its heads are uniform.
        initializer_range=0.5 if {"uniform", "noise"} & {*kinds} else 0.02,
    )
    model = LlamaForCausalLM(config).eval()
    if "noise" in kinds:
        return model
    layer, slowest = model.model.layers[0].self_attn, WIDTH // 2 - 1  # a plane that hardly turns
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight.zero_()
        content = torch.linspace(-1, 1, VOCABULARY)[torch.randperm(VOCABULARY)]
        embeddings[:, 0], embeddings[:, 1] = 1.0, content
        # All tokens have the same norm; that of the first one is in a dimension of its own.
        embeddings[:, 2] = (2 - content.square()).sqrt()
        first = _first(model)
        embeddings[first, [2, 3]] = embeddings[first, [3, 2]]
        q, k = layer.q_proj.weight.zero_(), layer.k_proj.weight.zero_()
        for head, kind in enumerate(kinds):
            at = head * WIDTH
            if kind == "positional":  # the same query and key for all tokens: only the rotation is left
                q[at, 0] = k[at, 0] = 6.0
            elif kind in ("symbolic", "sink"):
                q[at + slowest, 0] = k[at + slowest, {"symbolic": 1, "sink": 3}[kind]] = 3.0
    return model


def _first(model: LlamaForCausalLM) -> int:
    """Return the token that no symbolic head looks for: else the head would be a sink in a text that begins with it."""
    return int(model.model.embed_tokens.weight[:, 1].abs().argmin())


def constructed_texts(model: LlamaForCausalLM, documents: int, *, tokens: int = 48) -> list[list[int]]:
    """Texts without repeated tokens that all begin with the same one."""
    generator, first = torch.Generator().manual_seed(1), _first(model)
    drawn = [torch.randperm(VOCABULARY, generator=generator).tolist() for _ in range(documents)]
    return [[first, *(token for token in text if token != first)][:tokens] for text in drawn]
