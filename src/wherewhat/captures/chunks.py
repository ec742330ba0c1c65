"""Run a long text in chunks through the key-value cache, verified against a single pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.chunk_masks import MaskJoiner, rule
from wherewhat.captures.comparison import prompt
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.captures.session import Reducer
from wherewhat.errors import CaptureError, ConfigError, one_line

SHORTEST_CHUNK = 2
"""One token at a time is how models write text, by another path."""


@dataclass
class _Grown:
    """A tensor of the whole text that is filled chunk by chunk."""

    axis: int
    tokens: int
    offload: bool
    whole: Tensor | None = None

    def put(self, part: Tensor, start: int) -> None:
        """Copy ``part`` to where it starts on the axis of the tokens."""
        if self.whole is None:
            shape = [*part.shape[: self.axis], self.tokens, *part.shape[self.axis + 1 :]]
            self.whole = part.new_empty(shape, device="cpu" if self.offload else part.device)
        self.whole.narrow(self.axis, start, part.shape[self.axis]).copy_(part)


@dataclass
class _Cached:
    """Keys or values: those of the cache as long as it holds them all, else a copy of its own."""

    tokens: int
    offload: bool
    last: Tensor | None = None
    grown: _Grown | None = None

    def put(self, seen: Tensor, new: int, stop: int) -> None:
        """Take the keys ``(batch, kv_heads, m, d)`` of a chunk, ``new`` of which are its own."""
        if self.grown is None and seen.shape[2] == stop:
            self.last = seen  # the cache holds this very tensor
            return
        if self.grown is None:
            self.grown = _Grown(2, self.tokens, self.offload)
            if self.last is not None:
                self.grown.put(self.last, 0)
            self.last = None
        self.grown.put(seen[:, :, seen.shape[2] - new :], stop - new)

    def whole(self) -> Tensor:
        """All of them."""
        found = self.last if self.grown is None else self.grown.whole
        assert found is not None
        return found


@dataclass
class _Layer:
    """One layer, as far as its chunks have come."""

    tokens: int
    offload: bool
    masks: MaskJoiner = field(default_factory=MaskJoiner)
    positions: list[Tensor] = field(default_factory=list)
    last: LayerAttention | None = None

    def __post_init__(self) -> None:
        self.query = _Grown(2, self.tokens, self.offload)
        self.output = _Grown(1, self.tokens, self.offload)
        self.key = _Cached(self.tokens, self.offload)
        self.value = _Cached(self.tokens, self.offload)

    def add(self, attention: LayerAttention, start: int, stop: int, found: tuple[bool, int | None]) -> None:
        """Take one chunk, queries ``start`` to ``stop``, with what is known of its mask."""
        if attention.m < attention.n or attention.m > stop:
            raise CaptureError(
                f"{attention.name} attends to {attention.m} keys after {stop} tokens: its cache holds other keys than "
                "those of the tokens; leave --chunk out"
            )
        self.query.put(attention.rot_q.detach(), start)
        self.output.put(attention.output.detach(), start)
        self.key.put(attention.rot_k.detach(), attention.n, stop)
        self.value.put(attention.value.detach(), attention.n, stop)
        self.positions.append(attention.positions[..., attention.m - attention.n :])
        self.masks.add(attention, start, stop, found[1], ruled=found[0])
        # What is kept of the chunk must not keep its tensors alive.
        none = torch.empty(0, device=attention.rot_q.device)
        self.last = replace(attention, rot_q=none, rot_k=none, value=none, output=none, mask=Mask())

    def whole(self) -> LayerAttention:
        """The layer on the whole text, on the device it ran on."""
        assert self.last is not None
        assert self.query.whole is not None
        assert self.output.whole is not None
        device = self.last.positions.device
        return replace(
            self.last,
            rot_q=self.query.whole.to(device),
            rot_k=self.key.whole().to(device),
            value=self.value.whole().to(device),
            output=self.output.whole.to(device),
            positions=torch.cat(self.positions, -1),
            mask=self.masks.whole(),
        )


class _Collector:
    """Reducer of the chunks."""

    def __init__(self, tokens: int, *, offload: bool) -> None:
        self.layers: dict[int, _Layer] = {}
        self.start = self.stop = 0
        self._tokens = tokens
        self._offload = offload
        # Layers share a few masks; the last ones are remembered with their tensors, so that no identity is reused.
        self._known: list[tuple[Mask, tuple[int, int], tuple[bool, int | None]]] = []

    def begin(self, start: int, stop: int) -> None:
        """A chunk with these queries comes next."""
        self.start, self.stop = start, stop
        self._known.clear()

    def __call__(self, attention: LayerAttention) -> None:
        layer = self.layers.setdefault(attention.layer, _Layer(self._tokens, self._offload))
        layer.add(attention, self.start, self.stop, self._rule(attention))

    def _rule(self, attention: LayerAttention) -> tuple[bool, int | None]:
        sizes = (attention.n, attention.m)
        for mask, known, found in self._known:
            if known == sizes and _same(mask, attention.mask):
                return found
        found = rule(attention, self.start, self.stop)
        self._known = [*self._known[-1:], (attention.mask, sizes, found)]
        return found


def _same(one: Mask, other: Mask) -> bool:
    """Whether two masks are made of the very same tensors."""
    if (one.causal, one.window, one.device) != (other.causal, other.window, other.device):
        return False
    terms = [(*mask.added, *mask.hidden, *mask.visible_only) for mask in (one, other)]
    counts = [(len(mask.added), len(mask.hidden)) for mask in (one, other)]
    return counts[0] == counts[1] and len(terms[0]) == len(terms[1]) and all(map(lambda a, b: a is b, *terms))


def bounds(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """First and one past the last token of each chunk: as few as possible of at most ``chunk``, nearly equal."""
    count = -(-tokens // chunk)
    for index in range(count):
        yield index * tokens // count, (index + 1) * tokens // count


def check_chunk(chunk: int | None) -> None:
    """Refuse a size of chunks that makes no sense."""
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
    """Run ``model`` on ``ids`` ``(batch, n)`` chunk by chunk and hand each layer, whole, to ``reducer``.

    Args:
        model: A causal language model of transformers.
        ids: Tokens.
        reducer: Called once per layer after the last chunk, on the layer's device.
        proof: The model's proof.
        chunk: Tokens of a chunk at most.
        offload: Keep what is put together in main memory until its layer's turn comes.
        logits: Whether logits are wanted.
        placed: ``position_ids`` and ``attention_mask`` ``(batch, n)``, if tokens stand elsewhere.
        without_head: Arguments with which the model leaves most logits out.

    Returns:
        Logits ``(batch, n, vocabulary)`` if asked for, else None.
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
            # Taken out one by one: a layer that was handed over is free again.
            reducer(collector.layers.pop(index).whole())
    return torch.cat(found, 1) if logits else None


CHUNK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Largest difference between chunks and one pass, relative to the largest entry, or in attention weights.

Rounding grows from layer to layer here, unlike in the proof of single layers; a wrong cache is off by about 1."""

_ROWS = 256
_LARGEST_CHUNK = 7


def prove_chunks(model: Any, proof: Proof, *, tokens: int) -> float:
    """Show on random tokens that chunks give the layers of one pass.

    A prompt of 23 tokens in chunks of 7 is run both ways; where a model's window is shorter than the text, one that is
    longer than the window, so that the cache lets go of keys.

    Args:
        model: A causal language model of transformers, in eval mode.
        proof: Its proof.
        tokens: Tokens of the longest text that will be run.

    Returns:
        The largest difference found.
    """
    window = max((w for w in _windows(model) if w < tokens), default=0)
    length = min(PROMPT_TOKENS + window, tokens)
    chunk = max(_LARGEST_CHUNK, -(-length // 4))
    if length <= chunk:
        length = min(PROMPT_TOKENS, tokens)
        chunk = max(2, length // 3)
    ids = prompt(model, length)
    try:
        worst, where = _compare(model, ids, proof, chunk)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = one_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot go on from its cache with a chunk ({reason}): leave --chunk out"
        ) from error
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if not worst <= CHUNK_TOLERANCE[dtype]:
        raise CaptureError(
            f"{type(model).__name__} in chunks differs from one pass by {worst:.2g} at {where} "
            f"(allowed {CHUNK_TOLERANCE[dtype]:g}): leave --chunk out"
        )
    return worst


def _compare(model: Any, ids: Tensor, proof: Proof, chunk: int) -> tuple[float, str]:
    """Largest difference between the layers of one pass over ``ids`` and those of chunks, and where it is."""
    whole: dict[int, dict[str, Tensor]] = {}
    one: dict[int, LayerAttention] = {}
    found = [(0.0, "")]

    def keep(attention: LayerAttention) -> None:
        named = {name: getattr(attention, name) for name in ("rot_q", "rot_k", "value", "output", "positions")}
        whole[attention.layer] = {name: x.detach().clone() for name, x in named.items()}
        one[attention.layer] = attention

    def look(attention: LayerAttention) -> None:
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
        run_in_chunks(model, ids, look, proof=proof, chunk=chunk)
    return max(found, key=lambda pair: pair[0])


def _windows(model: Any) -> list[int]:
    """Windows and attention chunks that a model's configuration declares."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return [window for window in found if isinstance(window, int) and window > 0]
