"""The kinds of perturbation by name, with what each disturbs in words."""

from __future__ import annotations

KINDS: dict[str, str] = {
    "words": "words transposed",
    "adjacent_words": "adjacent words transposed",
    "tokens": "tokens transposed",
    "adjacent_tokens": "adjacent tokens transposed",
    "sentences": "sentences transposed",
    "letters": "words with letters transposed",
    "position_jitter": "positions jittered",
    "position_swap": "positions swapped",
    "position_shuffle": "positions shuffled",
    "position_gaps": "gaps between positions",
    "position_shift": "positions shifted",
    "features": "hidden states swapped",
}
"""What each kind disturbs, most important first."""


def labels(kind: str, layers: tuple[int, ...]) -> dict[str, int | None]:
    """Names under which a kind's numbers are stored, with the layer of each where it is about one."""
    return {f"{kind}_{layer}": layer for layer in layers} if kind == "features" else {kind: None}


def percent(rate: float) -> str:
    """A rate as it stands in names of metrics: 5 for 0.05."""
    return f"{100 * rate:.6g}"
