"""The proof that chunks through the key-value cache show what one pass shows, before a model is run in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.chunks import run_in_chunks
from wherewhat.capturing.passes import prompt
from wherewhat.capturing.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.errors import CaptureError, one_line

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

    Raises:
        CaptureError: If it is too large, or the model cannot be run in chunks.
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
