"""Short names for what many capture tests do: build a tiny model, run it under capture, keep copies."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.tiny_config import LAYERS, SIZES
from conformance.tiny_models import build
from helpers.tolerance import rounding
from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.blocks import blocks, key_mixing
from wherewhat.captures.proof import Proof, capture, intervene, prove
from wherewhat.captures.stream import ResidualStream
from wherewhat.measures.attention import attention_output
from wherewhat.measures.swaps.logits import QueryLogits
from wherewhat.measures.variants import VariantRuns

# Two orders of summation in a pass of a tiny model: four layers of products of up to 96 terms each, as float32 rounds.
# A wrong key, position, scale or mask changes what is compared by 1e-2 or more.
WITHIN = LAYERS * rounding(SIZES["intermediate_size"])


def tiny(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A tiny model in evaluation mode: a copy of one that is built once."""
    if model_type.startswith("gemma2"):  # the SDPA of older transformers leaves its soft-cap out, which is refused
        options.setdefault("attn_implementation", "eager")
    if "changes" in options:
        return build(model_type, seed=seed, **options).model.to(dtype)
    return copy.deepcopy(_built(model_type, seed=seed, **options)).to(dtype)


@functools.cache
def _built(model_type: str, **options: Any) -> Any:
    return build(model_type, **options).model


@functools.cache
def shared(model_type: str, **options: Any) -> Any:
    """The tiny model that the tests of a process share: none of them changes it, so that it is proved once."""
    return tiny(model_type, **options)


@functools.cache
def proved(model_type: str, **options: Any) -> tuple[Any, Proof]:
    """The shared model and its proof."""
    model = shared(model_type, **options)
    return model, prove(model)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, within: float = WITHIN) -> None:
    """Assert that two tensors have one shape and differ by rounding, relative to the largest entry of the second."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=within * float(expected.abs().max()), rtol=0)


def tokens(length: int = 23, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random plain tokens, ``(batch, length)``."""
    return torch.randint(16, 160, (batch, length), generator=torch.Generator().manual_seed(seed))


def copied(attention: LayerAttention) -> LayerAttention:
    """The same attention on tensors of its own, so that it outlives the forward pass."""

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, tuple):
            return tuple(own(v) for v in value)
        if isinstance(value, Mask):
            return replace(value, **{name: own(v) for name, v in vars(value).items()})
        return value

    fields = attention.__dataclass_fields__
    return LayerAttention(**{name: own(getattr(attention, name)) for name in fields})


@dataclass
class Kept:
    """Reducer that keeps a copy of every layer."""

    layers: list[LayerAttention]

    def __call__(self, attention: LayerAttention) -> None:
        self.layers.append(copied(attention))


def run(model: Any, ids: torch.Tensor, **inputs: Any) -> list[LayerAttention]:
    """Every layer of one captured pass, copied."""
    kept = Kept([])
    with torch.no_grad(), capture(model, kept):
        model(input_ids=ids, **{"use_cache": False, **inputs})
    return kept.layers


class TinySubject:
    """A tiny model as measurements see it; all tests of a process share it."""

    def __init__(self, family, **options):
        self.model, self.proof = proved(family, **options)

    def run(self, ids, reducer, *, logits=False):
        with torch.no_grad(), capture(self.model, reducer, proof=self.proof):
            out = self.model(input_ids=ids, use_cache=False).logits
        return out if logits else None

    def edited(self, ids, editor):
        with torch.no_grad(), intervene(self.model, editor, proof=self.proof):
            return self.model(input_ids=ids, use_cache=False).logits

    def check_plan(self, plan):
        plan.check(self.model, self.proof)

    def key_mixing(self):
        return key_mixing(self.model, self.proof)

    def blocks(self, ids):
        return blocks(self.model, ids, self.proof)

    def variants(self, ids, *, logits=False):
        return VariantRuns(self.model, self.proof, ids, planted=False, logits=logits)

    def stream(self):
        return ResidualStream(self.model, self.proof)


def swapped_logits(query: QueryLogits) -> torch.Tensor:
    """Logits of all keys at all positions before soft-cap and bias, ``(groups, rows, contents, places)``."""
    q, k, turns = (x.to(torch.complex128) for x in (query.q, query.k, query.turns.expand(len(query.k), -1, -1)))
    return torch.einsum("grf,gcf,gpf->grcp", q.conj(), k, turns).real


def dense_logits(model: Any, ids: torch.Tensor, plan: Any) -> torch.Tensor:
    """Logits under a plan by a mask of all pairs of tokens, one text at a time."""

    def edit(attention: LayerAttention) -> torch.Tensor | None:
        full = plan.full_heads(attention.layer)
        if not full:
            return None

        def pattern(rows: slice) -> torch.Tensor:
            i = torch.arange(attention.n)[rows, None] + attention.m - attention.n
            j = torch.arange(attention.m)
            seen = torch.tensor(full)[:, None, None] | (i - j < plan.window) | (j < plan.sinks)
            return attention.weigh(attention.attn_scores(rows).masked_fill(~seen, -torch.inf), rows)

        return attention_output(attention, block_mib=1, pattern=pattern)

    with torch.no_grad(), intervene(model, edit):
        return torch.cat([model(input_ids=row[None], use_cache=False).logits for row in ids])
