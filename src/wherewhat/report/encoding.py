"""Numbers and text in the form a page carries them: few digits, packed curves, JSON that cannot end its script."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import torch
from torch import Tensor

_DIGITS = 4
_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def rounded(value: float | None) -> float | None:
    """A number with four digits; None where there is none or it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def packed(values: Tensor, *, bits: int) -> dict[str, Any]:
    """Numbers ``(n,)`` as unsigned integers between their least and greatest, in base64.

    Args:
        values: The numbers; those that are not finite become the greatest integer, which stands for nothing.
        bits: 8 or 16.

    Returns:
        ``lo``, ``hi``, ``bits`` and ``data`` (little-endian); integer q stands for ``lo + (hi - lo) q / (2^bits - 2)``.
    """
    levels = 2**bits - 2
    numbers = values.detach().double().cpu().flatten()
    defined = torch.isfinite(numbers)
    low, high = (float(edge) for edge in numbers[defined].aminmax()) if bool(defined.any()) else (0.0, 0.0)
    scaled = (numbers - low) * (levels / (high - low) if high > low else 0.0)
    codes = torch.where(defined, scaled.round().clamp(0, levels), levels + 1.0)
    data = codes.to(torch.int64).numpy().astype("u1" if bits == 8 else "<u2").tobytes()
    return {"lo": _edge(low), "hi": _edge(high), "bits": bits, "data": base64.b64encode(data).decode("ascii")}


def script_json(data: Any) -> str:
    """JSON that is safe inside an HTML script element, whatever text it holds.

    All but ASCII is escaped, U+2028 and lone surrogates among it, and no character is left that HTML knows.
    """
    plain = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Outside strings JSON has none of these characters, so every one of them can be written as an escape.
    return plain.translate(_HTML)


def _edge(value: float) -> float:
    return float(f"{value:.7g}")
