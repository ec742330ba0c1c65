"""A tiny random model of every causal language model type in the installed transformers, built in code.

``build("llama")`` gives a float32 model on the CPU whose weights depend on the seed alone, and
``build("llama:yarn")`` one of ``variants()``. Nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conformance.odd_ones import CONFIG_CLASSES, NOT_BUILDABLE, not_causal, without_timm
from conformance.overrides import OVERRIDES, QUERY_KEY_GAINS, QUERY_KEY_NORM_GAINS
from conformance.reweight import QUERY_KEY_GAIN, reweight
from conformance.tiny_config import VOCAB, tiny_config
from conformance.variants import VARIANTS

__all__ = ["NotBuildable", "Tiny", "build", "causal_lm_types", "not_causal", "variants"]

_FIRST_PLAIN_TOKEN = 16


class NotBuildable(Exception):
    """This type has no causal language modelling forward pass on text alone, or needs an absent package."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"{model_type}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Tiny:
    """A tiny model and what to feed it.

    Attributes:
        model_type: The type, or ``type:variant``, it was built from.
        model: In evaluation mode, float32, on the CPU.
    """

    model_type: str
    model: PreTrainedModel

    def inputs(self, length: int = 23, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random plain tokens, none of them special: ``{"input_ids": (1, length)}``."""
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(_FIRST_PLAIN_TOKEN, VOCAB, (1, length), generator=generator)}


def causal_lm_types() -> list[str]:
    """All model types that the installed transformers maps to a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def variants() -> list[str]:
    """Names ``type:variant`` that ``build`` takes beyond the plain types, where the type is installed."""
    return sorted(name for name in VARIANTS if name.partition(":")[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(
    model_type: str,
    *,
    seed: int = 0,
    attn_implementation: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Tiny:
    """Build a tiny model of a type or variant.

    Args:
        model_type: One of ``causal_lm_types()`` or ``variants()``.
        seed: Decides every weight.
        attn_implementation: ``eager`` or ``sdpa`` from the start, for types that cannot change it later; None
            takes the type's own choice.
        changes: Fields of the configuration that replace those of the type or variant.

    Raises:
        NotBuildable: If the type cannot run on text alone here.
        KeyError: If there is no such type or variant.
    """
    plain = model_type.partition(":")[0]
    if plain not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise KeyError(f"no causal language model type {plain!r} in the installed transformers")
    if plain in NOT_BUILDABLE:
        raise NotBuildable(plain, NOT_BUILDABLE[plain])
    config = _config(plain, model_type, changes or {})
    options: dict[str, Any] = {"dtype": torch.float32}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = _from_config(plain, config, **options)
        except ImportError as error:
            raise NotBuildable(plain, " ".join(str(error).split())) from error
    model.eval()
    reweight(
        model,
        seed=seed,
        query_key_gain=QUERY_KEY_GAINS.get(model_type, QUERY_KEY_GAINS.get(plain, QUERY_KEY_GAIN)),
        query_key_norm_gain=QUERY_KEY_NORM_GAINS.get(plain, 1.0),
    )
    return Tiny(model_type, model)


def _config(plain: str, model_type: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    overrides = OVERRIDES.get(plain, {}) | (VARIANTS[model_type] if model_type != plain else {}) | changes
    config_class = CONFIG_MAPPING[plain]
    if plain in CONFIG_CLASSES:
        config_class = getattr(transformers, CONFIG_CLASSES[plain])
    # A configuration keeps and changes the dicts it is given.
    config = tiny_config(config_class, copy.deepcopy(overrides))
    if plain == "gemma3n":
        without_timm(config)
    return config


def _from_config(plain: str, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    if plain in CONFIG_CLASSES:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain])._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, **options)
