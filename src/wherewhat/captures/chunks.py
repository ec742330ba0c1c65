"""Run a long text in chunks through the key-value cache, verified against a single pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.chunk_masks import MaskJoiner, MaskRule, mask_rule
from wherewhat.captures.comparison import random_prompt
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.captures.session import Reducer
from wherewhat.errors import CaptureError, ConfigError, one_line

CHUNK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Largest difference between chunks and one pass, relative to the largest entry, or in attention weights.

Rounding accumulates over layers, unlike in the proof of single layers; a wrong cache causes errors of about 1."""

SHORTEST_CHUNK = 2
"""Smallest chunk: passes of one token use other code, for generation."""

_ROWS = 256


def bounds(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last token of each chunk: as few as possible of at most ``chunk`` tokens."""
    count = -(-tokens // chunk)
    for index in range(count):
        yield index * tokens // count, (index + 1) * tokens // count


def check_chunk(chunk: int | None) -> None:
    """Refuse a size of chunks that is too small."""
    if chunk is not None and chunk < SHORTEST_CHUNK:
        raise ConfigError(f"--chunk is {chunk}: chunks of at least {SHORTEST_CHUNK} tokens are needed; 512 is usual")


def run_in_chunks(
    model: Any,
    ids: Tensor,
    reducer: Reducer,
    *,
    proof: Proof,
    chunk: int,
    offload: bool = False,
    logits: bool = False,
    placed: dict[str, Tensor] | None = None,
    without_head: dict[str, Any] | None = None,
) -> Tensor | None:
    """Run ``model`` on ``ids`` ``(batch, n)`` chunk by chunk, and pass each complete layer to ``reducer``.

    Args:
        model: A causal language model of transformers.
        ids: Tokens.
        reducer: Called once per layer after the last chunk, on the layer's device.
        proof: The model's proof.
        chunk: Largest number of tokens of a chunk.
        offload: Keep collected layers in main memory until they are passed to the reducer.
        logits: Whether to return logits.
        placed: ``position_ids`` and ``attention_mask`` ``(batch, n)``, if positions are not 0, 1, 2, …
        without_head: Arguments with which the model computes few logits.

    Returns:
        Logits ``(batch, n, vocabulary)`` if requested, else None.
    """
    check_chunk(chunk)
    tokens = ids.shape[1]
    collector = _Collector(tokens, offload=offload)
    found: list[Tensor] = []
    cache: Any = None
    with torch.no_grad(), capture(model, collector, proof=proof):
        for start, stop in bounds(tokens, chunk):
            collector.begin(start, stop)
            given = dict({} if logits else without_head or {})
            if placed:
                given["position_ids"] = placed["position_ids"][:, start:stop]
                given["attention_mask"] = placed["attention_mask"][:, :stop]
            if cache is not None:
                given["past_key_values"] = cache
            output = model(input_ids=ids[:, start:stop], use_cache=True, **given)
            cache = getattr(output, "past_key_values", None)
            if cache is None:
                raise CaptureError(f"{type(model).__name__} has no key-value cache: leave --chunk out")
            if logits:
                found.append(output.logits)
            del output
        del cache
    with torch.no_grad():
        for index in list(collector.layers):
            # Removed one by one, so that memory of finished layers is freed.
            reducer(collector.layers.pop(index).whole())
    return torch.cat(found, 1) if logits else None


def prove_chunks(model: Any, proof: Proof, *, tokens: int) -> float:
    """Show on random tokens that chunks give the same layers as one pass.

    Runs a prompt of 23 tokens in chunks of 7; for models with a window shorter than the text, a prompt longer than the
    window, so that the cache drops keys.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        tokens: Number of tokens of the longest text.

    Returns:
        The largest difference.
    """
    window = max((w for w in _windows(model) if w < tokens), default=0)
    length = min(PROMPT_TOKENS + window, tokens)
    chunk = max(7, -(-length // 4))
    if length <= chunk:
        length = min(PROMPT_TOKENS, tokens)
        chunk = max(2, length // 3)
    ids = random_prompt(model, length)
    try:
        worst, where = _compare(model, ids, proof, chunk)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise CaptureError(
            f"{type(model).__name__} cannot continue from its cache with a chunk ({one_line(error)}): leave --chunk out"
        ) from error
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if not worst <= CHUNK_TOLERANCE[dtype]:
        raise CaptureError(
            f"{type(model).__name__} in chunks differs from one pass by {worst:.2g} at {where} "
            f"(allowed {CHUNK_TOLERANCE[dtype]:g}): leave --chunk out"
        )
    return worst


def _compare(model: Any, ids: Tensor, proof: Proof, chunk: int) -> tuple[float, str]:
    """Return the largest difference between the layers of one pass over ``ids`` and of chunks, and its location."""
    whole: dict[int, dict[str, Tensor]] = {}
    one: dict[int, LayerAttention] = {}
    found = [(0.0, "")]

    def keep(attention: LayerAttention) -> None:
        named = {name: getattr(attention, name) for name in ("rot_q", "rot_k", "value", "output", "positions")}
        whole[attention.layer] = {name: x.detach().clone() for name, x in named.items()}
        one[attention.layer] = attention

    def compare(attention: LayerAttention) -> None:
        before = whole.pop(attention.layer)
        for name, was in before.items():
            is_now = getattr(attention, name)
            if is_now.shape != was.shape:
                found.append((torch.inf, f"{attention.name}, {name}"))
                return
            size = was.double().abs().max().clamp_min(1e-30)
            error = float((is_now.double() - was.double()).abs().max() / size)
            found.append((error, f"{attention.name}, {name}"))
        reference = one.pop(attention.layer)
        for start in range(0, attention.n, _ROWS):
            rows = slice(start, min(start + _ROWS, attention.n))
            if bool((attention.visible(rows) != reference.visible(rows)).any()):
                found.append((torch.inf, f"{attention.name}, mask"))
                return
            error = float((attention.pattern(rows) - reference.pattern(rows)).abs().max())
            found.append((error, f"{attention.name}, attention weights"))

    with torch.no_grad():
        with capture(model, keep, proof=proof):
            model(input_ids=ids, use_cache=False)
        run_in_chunks(model, ids, compare, proof=proof, chunk=chunk)
    return max(found, key=lambda pair: pair[0])


def _windows(model: Any) -> list[int]:
    """Return the windows and attention chunks in a model's configuration."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return [window for window in found if isinstance(window, int) and window > 0]


@dataclass
class _TextTensor:
    """A tensor of the whole text that is filled chunk by chunk, in main memory if ``offload`` is set."""

    axis: int
    tokens: int
    offload: bool
    data: Tensor | None = None

    def put(self, part: Tensor, start: int) -> None:
        """Copy ``part`` to its tokens, from ``start`` on."""
        if self.data is None:
            shape = [*part.shape[: self.axis], self.tokens, *part.shape[self.axis + 1 :]]
            self.data = part.new_empty(shape, device="cpu" if self.offload else part.device)
        self.data.narrow(self.axis, start, part.shape[self.axis]).copy_(part)

    def whole(self) -> Tensor:
        """Return the complete tensor."""
        assert self.data is not None
        return self.data


@dataclass
class _CachedTensor(_TextTensor):
    """Keys or values ``(batch, kv_heads, m, d)``: those of the cache while it holds all tokens, else a copy."""

    in_cache: bool = True

    def put_last(self, seen: Tensor, new: int, stop: int) -> None:
        """Store the keys that a chunk has seen, of which ``new`` belong to the chunk, up to token ``stop``."""
        if self.in_cache and seen.shape[2] == stop:
            self.data = seen  # the cache holds this tensor
            return
        if self.in_cache:
            before, self.data, self.in_cache = self.data, None, False
            if before is not None:
                self.put(before, 0)
        self.put(seen[:, :, seen.shape[2] - new :], stop - new)


class _ChunkedLayer:
    """One layer, filled chunk by chunk."""

    def __init__(self, tokens: int, offload: bool) -> None:
        self.query = _TextTensor(2, tokens, offload)
        self.output = _TextTensor(1, tokens, offload)
        self.key = _CachedTensor(2, tokens, offload)
        self.value = _CachedTensor(2, tokens, offload)
        self.masks = MaskJoiner()
        self.positions: list[Tensor] = []
        self.last: LayerAttention | None = None

    def add(self, attention: LayerAttention, start: int, stop: int, rule: MaskRule | None) -> None:
        """Add one chunk with queries ``start`` to ``stop``."""
        if attention.m < attention.n or attention.m > stop:
            raise CaptureError(
                f"{attention.name} attends to {attention.m} keys after {stop} tokens: its cache holds other keys than "
                "those of the tokens; leave --chunk out"
            )
        self.query.put(attention.rot_q.detach(), start)
        self.output.put(attention.output.detach(), start)
        self.key.put_last(attention.rot_k.detach(), attention.n, stop)
        self.value.put_last(attention.value.detach(), attention.n, stop)
        self.positions.append(attention.positions[..., attention.m - attention.n :])
        self.masks.add(attention, start, stop, rule)
        # Without the tensors of the chunk, which would be kept alive.
        none = torch.empty(0, device=attention.rot_q.device)
        self.last = replace(attention, rot_q=none, rot_k=none, value=none, output=none, mask=Mask())

    def whole(self) -> LayerAttention:
        """Return the layer on the whole text, on the device on which it ran."""
        assert self.last is not None
        device = self.last.positions.device
        return replace(
            self.last,
            rot_q=self.query.whole().to(device),
            rot_k=self.key.whole().to(device),
            value=self.value.whole().to(device),
            output=self.output.whole().to(device),
            positions=torch.cat(self.positions, -1),
            mask=self.masks.whole(),
        )


class _Collector:
    """Reducer that collects the chunks of all layers."""

    def __init__(self, tokens: int, *, offload: bool) -> None:
        self.layers: dict[int, _ChunkedLayer] = {}
        self.start = self.stop = 0
        self._tokens = tokens
        self._offload = offload
        # Rules of the last masks, which layers share; their tensors are kept, so that no identity is reused.
        self._known: list[tuple[Mask, tuple[int, int], MaskRule | None]] = []

    def begin(self, start: int, stop: int) -> None:
        """Begin the chunk with these queries."""
        self.start, self.stop = start, stop
        self._known.clear()

    def __call__(self, attention: LayerAttention) -> None:
        layer = self.layers.setdefault(attention.layer, _ChunkedLayer(self._tokens, self._offload))
        layer.add(attention, self.start, self.stop, self._rule(attention))

    def _rule(self, attention: LayerAttention) -> MaskRule | None:
        sizes = (attention.n, attention.m)
        for mask, known, rule in self._known:
            if known == sizes and _same(mask, attention.mask):
                return rule
        rule = mask_rule(attention, self.start, self.stop)
        self._known = [*self._known[-1:], (attention.mask, sizes, rule)]
        return rule


def _same(one: Mask, other: Mask) -> bool:
    """Return whether two masks consist of the same tensors."""
    if (one.causal, one.window, one.device) != (other.causal, other.window, other.device):
        return False
    terms = [[list(map(id, x)) for x in (mask.added, mask.hidden, mask.visible_only)] for mask in (one, other)]
    return terms[0] == terms[1]
