"""The model types that are verified in every release, from a file that ``make models`` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from wherewhat.options import checked


@dataclass(frozen=True)
class SupportedModel:
    """Result of the verification of one model type of transformers, built as a tiny random model.

    Attributes:
        model_type: ``model_type`` of the config, such as ``llama``.
        variant: Name of a variant of the type, such as ``yarn``; None for the type with its usual settings.
        verified: Whether captured queries and keys reproduce its attention.
        attention: Whether it has softmax attention over the tokens of a text at all.
        route: How attention is observed, ``interface`` or ``trace``; None if it is not verified.
        position: How layers encode position, such as ``RoPE half``, one entry per kind of layer.
        features: What else layers have, such as ``GQA``, ``window``, ``soft-cap`` or ``sinks``.
        dtypes: Dtypes in which it is also verified with the properties of trained weights.
        reason: Why it is not verified; None if it is.
    """

    model_type: str
    variant: str | None
    verified: bool
    attention: bool
    route: str | None
    position: tuple[str, ...]
    features: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str | None


@checked()
def supported_models(*, variants: bool = False) -> list[SupportedModel]:
    """Return all causal language model types of transformers, verified or not, in alphabetical order.

    The list was made with the version of transformers that ``docs/models.md`` names. A model is verified again when it
    is loaded, so types that are not listed work if they pass, and listed ones are refused if they do not.

    Args:
        variants: Whether to include variants of types, such as Llama with YaRN, at the end.

    Examples:
        >>> [model.model_type for model in supported_models() if "sinks" in model.features]
        ['flint', 'gpt_oss', 'granite_swa', 'granitemoe_swa', 'hy_v4', 'mimo_v2_flash']
    """
    return [model for model in _catalog() if variants or model.variant is None]


@cache
def _catalog() -> tuple[SupportedModel, ...]:
    found = json.loads((files("wherewhat.models") / "data" / "catalog.json").read_text("utf-8"))
    return tuple(map(_model, found["models"]))


def _model(row: dict[str, Any]) -> SupportedModel:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return SupportedModel(**values)
