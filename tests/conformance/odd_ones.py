"""Types that need more than a table of values, that cannot run on text alone, or that are not causal."""

from __future__ import annotations

import re

import transformers
from transformers import PreTrainedConfig

_DRAFTER = "a drafter: its forward takes a target model's hidden states and keys and values, never text alone"

NOT_BUILDABLE: dict[str, str] = {
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
}

# The model takes a part of the type's configuration; the automatic class passes the whole and fails.
CONFIG_CLASSES: dict[str, str] = {
    "musicgen": "MusicgenDecoderConfig",
    "musicgen_melody": "MusicgenMelodyDecoderConfig",
}

_NOT_CAUSAL: dict[str, str] = {
    "cpmant": "treats the whole prompt as context that every token sees",
    "prophetnet": "its predicting stream reads relative position logits in the wrong order, so they come "
    "from other positions, later ones among them; the main stream is causal",
    "reformer": "sorts the whole prompt by hash bucket, so later tokens decide which earlier ones meet",
    "xlm:default": "a masked language model unless configured with causal=True",
    "xlnet:default": "attends in both directions unless configured with attn_type='uni'",
}
# These built a bidirectional mask even as decoders until 5.18.
_NOT_CAUSAL_BEFORE_5_18 = ("big_bird", "megatron-bert", "rembert", "roformer", "roformer:rotary_value")


def transformers_version() -> tuple[int, int]:
    """Major and minor version of the installed transformers."""
    major, minor = re.findall(r"\d+", transformers.__version__)[:2]
    return int(major), int(minor)


def not_causal() -> dict[str, str]:
    """Types and variants whose earlier outputs change with a later token, and why."""
    known = dict(_NOT_CAUSAL)
    if transformers_version() < (5, 18):
        known |= dict.fromkeys(_NOT_CAUSAL_BEFORE_5_18, "builds a bidirectional mask even as a decoder")
    return known


def without_timm(config: PreTrainedConfig) -> None:
    """Put an audio tower where Gemma 3n has a timm model: text reaches neither, and timm may be absent."""
    # The configuration checks the type on plain assignment.
    object.__setattr__(config, "vision_config", config.audio_config)
