"""Run a long text in chunks through the key-value cache, verified against a single pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask, MaskCopies, Rows
from wherewhat.captures.layer_proofs import blocks_of_rows, random_prompt
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.captures.session import Reducer
from wherewhat.errors import CaptureError, ConfigError, one_line

CHUNK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Largest difference between chunks and one pass, relative to the largest entry, or in attention weights.

Rounding accumulates over layers, unlike in the proof of single layers; a wrong cache causes errors of about 1.
Logits with another cache are compared by it too."""

SHORTEST_CHUNK = 2
"""Smallest chunk: passes of one token use other code, for generation."""

_SAME_SHIFT = 1e-4
"""Relative tolerance of key biases, which may differ between chunks by a constant without effect on the softmax."""


def bounds(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the first and one past the last token of each chunk: as few as possible of at most ``chunk`` tokens."""
    count = -(-tokens // chunk)
    for index in range(count):
        yield index * tokens // count, (index + 1) * tokens // count


def check_chunk(chunk: int) -> None:
    """Refuse a size of chunks that is too small."""
    if chunk < SHORTEST_CHUNK:
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
    logit_chunks: list[Tensor] = []
    cache: Any = None
    with torch.no_grad(), capture(model, collector, proof=proof):
        for start, stop in bounds(tokens, chunk):
            collector.begin(start, stop)
            arguments = dict({} if logits else without_head or {})
            if placed:
                arguments["position_ids"] = placed["position_ids"][:, start:stop]
                arguments["attention_mask"] = placed["attention_mask"][:, :stop]
            if cache is not None:
                arguments["past_key_values"] = cache
            output = model(input_ids=ids[:, start:stop], use_cache=True, **arguments)
            cache = getattr(output, "past_key_values", None)
            if cache is None:
                raise CaptureError(f"{type(model).__name__} has no key-value cache: leave --chunk out")
            if logits:
                logit_chunks.append(output.logits)
            del output
        del cache
    with torch.no_grad():
        for index in list(collector.layers):
            # Removed one by one, so that memory of finished layers is freed.
            reducer(collector.layers.pop(index).whole())
    return torch.cat(logit_chunks, 1) if logits else None


def prove_chunks(model: Any, proof: Proof, *, tokens: int) -> float:
    """Show on random tokens that chunks give the same layers as one pass, for texts of up to ``tokens`` tokens.

    Runs a prompt of 23 tokens in chunks of 7; for models with a window shorter than the text, a prompt longer than the
    window, so that the cache drops keys.

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
    references: dict[int, LayerAttention] = {}
    masks: MaskCopies = {}
    differences = [(0.0, "")]

    def keep(attention: LayerAttention) -> None:
        references[attention.layer] = attention.copied(memo=masks)

    def compare(attention: LayerAttention) -> None:
        reference = references.pop(attention.layer)
        for name in ("rot_q", "rot_k", "value", "output", "positions"):
            is_now, was = getattr(attention, name), getattr(reference, name)
            if is_now.shape != was.shape:
                differences.append((torch.inf, f"{attention.name}, {name}"))
                return
            size = was.double().abs().max().clamp_min(1e-30)
            error = float((is_now.double() - was.double()).abs().max() / size)
            differences.append((error, f"{attention.name}, {name}"))
        for rows in blocks_of_rows(attention.n):
            if bool((attention.visible(rows) != reference.visible(rows)).any()):
                differences.append((torch.inf, f"{attention.name}, mask"))
                return
            error = float((attention.pattern(rows) - reference.pattern(rows)).abs().max())
            differences.append((error, f"{attention.name}, attention weights"))

    with torch.no_grad():
        with capture(model, keep, proof=proof):
            model(input_ids=ids, use_cache=False)
        run_in_chunks(model, ids, compare, proof=proof, chunk=chunk)
    return max(differences, key=lambda pair: pair[0])


def _windows(model: Any) -> list[int]:
    """Return the windows and attention chunks in a model's configuration."""
    config = model.config.get_text_config()
    settings = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return [window for window in settings if isinstance(window, int) and window > 0]


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
        self.masks = _MaskJoiner()
        self.positions: list[Tensor] = []
        self.last: LayerAttention | None = None

    def add(self, attention: LayerAttention, start: int, stop: int, rule: Mask | None) -> None:
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
        self._known: list[tuple[tuple[Any, ...], Mask, Mask | None]] = []

    def begin(self, start: int, stop: int) -> None:
        """Begin the chunk with these queries."""
        self.start, self.stop = start, stop
        self._known.clear()

    def __call__(self, attention: LayerAttention) -> None:
        layer = self.layers.setdefault(attention.layer, _ChunkedLayer(self._tokens, self._offload))
        layer.add(attention, self.start, self.stop, self._rule(attention))

    def _rule(self, attention: LayerAttention) -> Mask | None:
        mask = attention.mask
        terms = (tuple(map(id, x)) for x in (mask.added, mask.hidden, mask.visible_only))
        key = (attention.n, attention.m, mask.causal, mask.window, mask.device, *terms)
        for known, _, rule in self._known:
            if known == key:
                return rule
        rule = _mask_rule(attention, self.start, self.stop)
        self._known = [*self._known[-1:], (key, mask, rule)]
        return rule


_Method = Callable[[Mask, slice, int, int], Tensor | None]
"""``Mask.visible`` or ``Mask.bias``."""


@dataclass(frozen=True)
class ChunkMask:
    """The mask of the chunk with queries ``start`` to ``stop``; cached keys are ``first_key`` to ``stop``."""

    start: int
    stop: int
    first_key: int
    mask: Mask


@dataclass(frozen=True)
class ChunkedMask(Mask):
    """The mask of a text whose chunks have no common rule, made of their masks."""

    chunks: tuple[ChunkMask, ...] = ()

    def visible(self, rows: Rows, n: int, m: int) -> Tensor:
        """Return True where a query may see a key; keys that were no longer cached are hidden."""
        return self._joined(rows, n, m, Mask.visible)

    def bias(self, rows: Rows, n: int, m: int) -> Tensor | None:
        """Return the finite part of the additive terms; None if there is none."""
        if not any(chunk.mask.added for chunk in self.chunks):
            return None
        return self._joined(rows, n, m, Mask.bias)

    def _joined(self, rows: Rows, n: int, m: int, method: _Method) -> Tensor:
        """Join the results of all chunks, ``(batch or 1, heads or 1, rows, m)``, with zeros where there is none."""
        if isinstance(rows, Tensor):
            spans = [(row, row + 1) for row in rows.tolist()]
        else:
            start, stop, step = rows.indices(n)
            if start >= stop:
                return self._joined(slice(0, 1), n, m, method)[..., :0, :]
            if step != 1:
                return self._joined(slice(start, stop), n, m, method)[..., ::step, :]
            spans = [(start, stop)]
        parts = [here for span in spans for here in self._within(*span, m, method)]
        outer = [max(x.shape[axis] for x in parts) for axis in (0, 1)]
        return torch.cat([x.expand(*outer, *x.shape[2:]) for x in parts], -2)

    def _within(self, start: int, stop: int, m: int, method: _Method) -> Iterator[Tensor]:
        """Yield the result of each chunk with queries from ``start`` to ``stop``."""
        for chunk in self.chunks:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low >= high:
                continue
            queries, keys = chunk.stop - chunk.start, chunk.stop - chunk.first_key
            here = method(chunk.mask, slice(low - chunk.start, high - chunk.start), queries, keys)
            here = torch.zeros(1, 1, 1, 1, device=self.device) if here is None else here.to(self.device)
            here = here.expand(*here.shape[:2], high - low, keys)
            yield torch.nn.functional.pad(here, (chunk.first_key, m - chunk.stop))


@dataclass
class _MaskJoiner:
    """Joins the masks of one layer's chunks.

    Masks with a rule, which are causal with or without a window, are stored as the rule, without n × n tensors. Biases
    that are the same for every query are stored once. Other terms are stored unchanged.
    """

    _chunks: list[ChunkMask] = field(default_factory=list)
    _rules: list[Mask | None] = field(default_factory=list)
    _key_terms: tuple[Tensor, ...] = ()

    def add(self, attention: LayerAttention, start: int, stop: int, rule: Mask | None) -> None:
        """Add the mask of the chunk with queries ``start`` to ``stop``, for which :func:`_mask_rule` found ``rule``."""
        first_key = stop - attention.m
        rest, key_terms = _split_terms(attention.mask)
        if rule is not None:
            self._set_key_terms(attention.name, key_terms, complete=first_key == 0)
            rest = rule
        self._rules.append(rule)
        mask = replace(rest, added=(*rest.added, *key_terms)) if key_terms else rest
        self._chunks.append(ChunkMask(start, stop, first_key, mask))

    def whole(self) -> Mask:
        """Return the mask of the text."""
        device = self._chunks[0].mask.device
        rules = [(chunk.stop, rule.window) for chunk, rule in zip(self._chunks, self._rules, strict=True) if rule]
        windows = {window for _, window in rules if window is not None}
        if len(rules) == len(self._chunks) and len(windows) <= 1:
            window = next(iter(windows), None)
            if window is None or all(stop <= window for stop, width in rules if width is None):
                hides = self._chunks[0].mask.hides
                return Mask(causal=True, window=window, added=self._key_terms, device=device, hides=hides)
        return ChunkedMask(device=device, chunks=tuple(self._chunks))

    def _set_key_terms(self, name: str, terms: tuple[Tensor, ...], *, complete: bool) -> None:
        """Store biases of keys, which must agree with those of the chunk before."""
        before, self._key_terms = self._key_terms, terms
        if not self._chunks or not (before or terms):
            return
        if not complete or len(before) != len(terms) or not all(map(_same_bias, before, terms)):
            raise CaptureError(f"{name} adds other biases to its keys in each chunk: leave --chunk out")


def _same_bias(old: Tensor, new: Tensor) -> bool:
    """Return whether biases of keys differ from those of fewer keys, which come first, by a constant."""
    new = new[..., : old.shape[-1]]
    if new.shape != old.shape:
        return False
    shift = (new - old).float()
    size = new.float().abs().max().clamp_min(1.0)
    return bool((shift.amax(-1) - shift.amin(-1)).max() <= _SAME_SHIFT * size)


def _split_terms(mask: Mask) -> tuple[Mask, tuple[Tensor, ...]]:
    """Return a mask without the additive terms that are the same for every query, and these terms."""
    key_terms = tuple(term for term in mask.added if term.ndim > 1 and term.shape[-2] == 1 and term.shape[-1] > 1)
    rest = tuple(term for term in mask.added if all(term is not other for other in key_terms))
    return replace(mask, added=rest), key_terms


def _mask_rule(attention: LayerAttention, start: int, stop: int) -> Mask | None:
    """Return the causal mask, with or without a window, that the chunk with queries ``start`` to ``stop`` has.

    Biases of keys are left out. None if the chunk has another mask.
    """
    mask, _ = _split_terms(attention.mask)
    n, m, everything = attention.n, attention.m, slice(None)
    visible, bias = mask.visible(everything, n, m), mask.bias(everything, n, m)
    if bias is not None and bool((bias * visible).any()):
        return None
    seen = int(visible[0, 0, -1].sum())
    window = None if seen == stop else seen
    if window is not None and m - n + 1 < min(window, start + 1):
        return None  # the first query would need keys that are no longer cached
    rule = Mask(causal=True, window=window, device=mask.device, hides=mask.hides)
    return rule if bool((visible == rule.visible(everything, n, m)).all()) else None
