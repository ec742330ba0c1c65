"""Write the data of the lesson's live pictures, ``docs/lesson/lesson.json``, from the embedded model.

    python tools/lesson.py

Four heads of SmolLM2-135M on the first embedded document: queries and keys of a few tokens before rotation, by RoPE
plane, the mean query and key, and the terms of the additive fit. The script of the page computes everything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherewhat

FILE = Path(__file__).resolve().parents[1] / "docs" / "lesson" / "lesson.json"
TOKENS = 256
SHOWN = slice(196, 220)
HEADS = {
    (11, 1): "positional: it looks one token back",
    (19, 1): "its distance curve falls steadily",
    (3, 3): "the key decides",
    (17, 3): "induction, and a sink",
}
"""Layer and head, and what is known of it from the pages on heads and axes."""

DIGITS = 4


def main() -> None:
    """Write the file."""
    loaded = wherewhat.load("smollm2")
    document = wherewhat.embedded_documents(1)[0]
    ids = loaded.encode(document.text, tokens=TOKENS)
    layers = wherewhat.attention(loaded, document, tokens=TOKENS)
    rotation = layers[0].rotation
    if rotation is None:
        raise SystemExit("the model does not rotate queries and keys")
    data = {
        "model": loaded.name,
        "document": document.name,
        "tokens": TOKENS,
        "first": SHOWN.start,
        "words": [loaded.tokenizer.decode([token]) for token in ids[SHOWN].tolist()],
        "theta": [float(f"{angle:.6g}") for angle in rotation.inv_freq.tolist()],
        "heads": [head_data(layers[layer], head, note) for (layer, head), note in HEADS.items()],
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n", "utf-8")
    print(f"{FILE}: {FILE.stat().st_size / 1000:.0f} kB")


def head_data(layer: wherewhat.LayerAttention, head: int, note: str) -> dict[str, Any]:
    """Return what the page needs of a head."""
    fit = wherewhat.axes(layer)
    queries = planes(layer.q[0, head], layer)
    keys = planes(layer.k[0, head * layer.kv_heads // layer.heads], layer)
    check(layer, head, queries, keys)
    return {
        "name": f"L{layer.layer}H{head}",
        "note": note,
        "r": rounded(fit.r[head]),
        "noise": round(fit.noise_floor, DIGITS),
        "q": pairs(queries[SHOWN]),
        "k": pairs(keys[SHOWN]),
        "mean_q": pairs(queries.mean(0)),
        "mean_k": pairs(keys.mean(0)),
        "a": rounded(fit.a[head]),
        "b": rounded(fit.b[head, SHOWN]),
        "c": rounded(fit.c[head, SHOWN]),
    }


def planes(x: Tensor, layer: wherewhat.LayerAttention) -> Tensor:
    """Return queries or keys ``(n, d)`` as complex numbers ``(n, planes)``, whose products are logits."""
    left, right = layer.rotation.halves  # type: ignore[union-attr]
    x = x.double() * layer.scale**0.5
    return torch.complex(x[:, left], x[:, right])


def check(layer: wherewhat.LayerAttention, head: int, queries: Tensor, keys: Tensor) -> None:
    """Raise unless the planes add up to the model's logits."""
    angle = layer.rotation.inv_freq.double()  # type: ignore[union-attr]
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    turned = torch.exp(1j * distance[..., None] * angle)
    logits = torch.einsum("ip,jp,ijp->ij", queries, keys.conj(), turned).real
    true = layer.attn_scores()[0, head].double()
    seen = distance >= 0
    torch.testing.assert_close(logits[seen], true[seen], atol=1e-3 * float(true[seen].abs().max()), rtol=0)


def pairs(x: Tensor) -> Any:
    """Return complex numbers as pairs of rounded ones."""
    return rounded(torch.view_as_real(x))


def rounded(x: Tensor) -> Any:
    """Return a tensor as lists of rounded numbers."""
    values = x.tolist()
    return _round(values)


def _round(value: Any) -> Any:
    return [_round(item) for item in value] if isinstance(value, list) else round(value, DIGITS)


if __name__ == "__main__":
    main()
