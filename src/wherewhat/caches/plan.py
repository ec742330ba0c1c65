"""Plans: which heads see the whole text, and which only the last and first keys; and their files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from wherewhat.boundary import check_whole_number, output_file, read_user_file
from wherewhat.captures.proof import Proof
from wherewhat.errors import ConfigError, MeasureError, one_line
from wherewhat.files import parse_object, readable_json, write_file
from wherewhat.imports import require

Unit = Literal["group", "head", "layer"]
"""What a plan chooses: whole key-value groups, whose cache can be dropped, single query heads, or whole layers."""

UNITS: tuple[Unit, ...] = get_args(Unit)

_VERSION = 1
_SAMPLES = 64
"""Entries of each weight that the fingerprint of a model includes."""


@dataclass(frozen=True)
class LayerHeads:
    """Numbers of heads of one layer with full attention.

    Attributes:
        heads: Number of query heads.
        groups: Number of key heads, each shared by a group of query heads.
    """

    heads: int
    groups: int

    def units(self, unit: Unit) -> int:
        """Return the number of groups or heads, or 1 for the whole layer."""
        return {"group": self.groups, "head": self.heads, "layer": 1}[unit]


@dataclass(frozen=True)
class Plan:
    """Heads that see the whole text; all others see the last ``window`` keys and the first ``sinks``.

    Layers with a window of their own are not part of a plan and stay as they are.

    Attributes:
        model: Name of the model.
        fingerprint: Its :func:`fingerprint`.
        window: Number of last keys that limited heads see, that of the query included.
        sinks: Number of first keys that they see.
        layers: Numbers of heads by layer.
        full: Groups or heads that see everything, by layer; ``(0,)`` for a layer that is chosen as a whole.
        unit: What ``full`` lists.
        scores: Scores by which they were chosen, one per unit, by layer; empty if unknown.
        provenance: Where the plan comes from and what it costs: JSON values.
    """

    model: str
    fingerprint: str
    window: int
    sinks: int
    layers: Mapping[int, LayerHeads]
    full: Mapping[int, tuple[int, ...]]
    unit: Unit = "group"
    scores: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        _check_types(self)
        if self.unit not in UNITS:
            raise ConfigError(f"unit is {_shown(self.unit)}: a plan chooses group, head or layer")
        if self.window < 1 or self.sinks < 0:
            raise ConfigError(
                f"window={self.window} and sinks={self.sinks}: give a window of 1 or more, sinks of 0 or more"
            )
        for layer, count in self.layers.items():
            if count.groups < 1 or count.heads < 1 or count.heads % count.groups:
                raise ConfigError(
                    f"layer {layer} of the plan has {count.heads} heads in {count.groups} groups: groups must be equal"
                )
        for layer, chosen in self.full.items():
            count_here = self._units(layer)
            if any(not 0 <= unit < count_here for unit in chosen) or len(set(chosen)) < len(chosen):
                raise ConfigError(
                    f"layer {layer} of the plan lists {_shown(chosen)}, but has {count_here} {self.unit}s with full "
                    "attention"
                )
        for layer, scores in self.scores.items():
            if len(scores) not in (0, self._units(layer)):
                raise ConfigError(
                    f"scores of layer {layer} of the plan are {len(scores)} numbers, not one for each of its "
                    f"{self._units(layer)} {self.unit}s"
                )

    def _units(self, layer: int) -> int:
        """Return the number of units of a layer; 0 if it is not planned."""
        return self.layers[layer].units(self.unit) if layer in self.layers else 0

    def __repr__(self) -> str:
        kept = f"{self.share:.0%} of {self.unit}s in full"
        return f"Plan({self.model!r}, {kept}, window {self.window:,}, sinks {self.sinks})"

    @property
    def share(self) -> float:
        """Share of groups, heads or layers that see everything."""
        total = sum(layer.units(self.unit) for layer in self.layers.values())
        return sum(map(len, self.full.values())) / max(1, total)

    def full_heads(self, layer: int) -> tuple[bool, ...]:
        """Return for each query head of a layer whether it sees everything; empty for layers that are not planned."""
        if layer not in self.layers:
            return ()
        heads = self.layers[layer].heads
        chosen = set(self.full.get(layer, ()))
        size = heads // self._units(layer)
        return tuple(head // size in chosen for head in range(heads))

    def cache_share(self, tokens: int) -> float:
        """Return the number of cached keys in planned layers after ``tokens`` tokens, relative to that of the model."""
        kept = total = 0
        for layer, count in self.layers.items():
            heads, size = self.full_heads(layer), count.heads // count.groups
            whole = sum(any(heads[group * size : (group + 1) * size]) for group in range(count.groups))
            kept += whole * tokens + (count.groups - whole) * min(tokens, self.window + self.sinks)
            total += count.groups * tokens
        return kept / max(1, total)

    def save(self, path: str | Path) -> Path:
        """Write the plan as a JSON file."""
        path = output_file(path, name="the plan")
        values: dict[str, Any] = {
            "wherewhat_plan": _VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "window": self.window,
            "sinks": self.sinks,
            "unit": self.unit,
            "share": self.share,
            "layers": {
                str(layer): {
                    "heads": count.heads,
                    "groups": count.groups,
                    "full": list(self.full.get(layer, ())),
                    "scores": list(self.scores.get(layer, ())),
                }
                for layer, count in self.layers.items()
            },
            "provenance": dict(self.provenance),
        }
        write_file(path, readable_json(values))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its JSON file."""
        content: Any = parse_object(read_user_file(path, name="the plan"))
        if not isinstance(content, dict) or content.get("wherewhat_plan") != _VERSION:
            raise ConfigError(f"{path} is not a plan: give a file that 'wherewhat plan' wrote")
        try:
            if not isinstance(content["layers"], dict) or not all(
                isinstance(x, dict) for x in content["layers"].values()
            ):
                raise ConfigError(f"layers of the plan is {_shown(content['layers'])}, not an object of objects")
            layers = {int(layer): values for layer, values in content["layers"].items()}
            return cls(
                model=content["model"],
                fingerprint=content["fingerprint"],
                window=content["window"],
                sinks=content["sinks"],
                layers={layer: LayerHeads(values["heads"], values["groups"]) for layer, values in layers.items()},
                full={layer: tuple(values["full"]) for layer, values in layers.items()},
                unit=cast("Unit", content["unit"]),
                scores={layer: tuple(values["scores"]) for layer, values in layers.items()},
                provenance=content["provenance"],
            )
        except ConfigError as error:
            raise ConfigError(f"the plan {path} is damaged: {error}") from error
        except KeyError as error:
            raise ConfigError(f"the plan {path} is damaged: it has no {error}; make it again") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the plan {path} is damaged ({one_line(error)}): make it again") from error

    def to_kvpress(self) -> Any:
        """Return a ``DuoAttentionPress`` of kvpress (tested: 0.5.5) that keeps the groups of this plan in full.

        Prefill and generate inside ``with plan.to_kvpress()(model):``. Unlike :func:`~wherewhat.planned`, kvpress
        computes the prompt without limits, then masks keys before its last ``window`` in the cache without removing
        them, and keeps all generated keys.
        """
        kvpress: Any = require(
            "kvpress", why="a press from a plan", install="--no-deps kvpress 'cachetools<6' fire termcolor"
        )
        scores = torch.tensor(self.pattern(), dtype=torch.float64).numpy()
        press = kvpress.DuoAttentionPress(head_compression_ratio=1 - self.share)
        # The method downloads patterns of a few models.
        press.load_attention_pattern = lambda model: (self.sinks, self.window, scores)
        hook = press.forward_hook

        def forward_hook(module: Any, inputs: Any, kwargs: dict[str, Any], output: Any) -> Any:
            # kvpress reads the positions of the queries here, which transformers passes in versions before 5.3 only.
            if "cache_position" not in kwargs:
                stop = kwargs["past_key_values"].get_seq_length(module.layer_idx)
                kwargs = kwargs | {"cache_position": torch.arange(stop - kwargs["hidden_states"].shape[1], stop)}
            return hook(module, inputs, kwargs, output)

        press.forward_hook = forward_hook
        return press

    def pattern(self) -> list[list[float]]:
        """Return the plan as an attention pattern of DuoAttention (Xiao et al., arXiv 2410.10819), also of kvpress.

        One row per layer has one number per key head, in the order of the scores: above 0.6 where it sees the whole
        text, at most 0.4 elsewhere. So both the threshold 0.5 of DuoAttention and a sparsity of one minus
        :attr:`share` give this plan. DuoAttention compares them in the dtype of the model, in which numbers nearer to
        0.5 could equal it.
        """
        if self.unit == "head":
            raise ConfigError(
                "a pattern of DuoAttention lists key heads, and this plan lists query heads: use unit=group"
            )
        if sorted(self.layers) != list(range(len(self.layers))) or len({x.groups for x in self.layers.values()}) > 1:
            raise ConfigError(
                f"a pattern of DuoAttention lists all layers, and {self.model} has layers with a window or with other "
                "numbers of key heads"
            )
        pattern = [[0.0] * count.groups for _, count in sorted(self.layers.items())]
        for full, lowest in ((False, 0.0), (True, 0.6)):
            units = [
                (
                    self.scores[layer][group * self._units(layer) // count.groups] if self.scores.get(layer) else 0.0,
                    layer,
                    group,
                )
                for layer, count in sorted(self.layers.items())
                for group in range(count.groups)
                if self.full_heads(layer)[group * count.heads // count.groups] == full
            ]
            for place, (_, layer, group) in enumerate(sorted(units), 1):
                pattern[layer][group] = lowest + 0.4 * place / len(units)
        return pattern

    def check(
        self,
        model: nn.Module,
        proof: Proof,
        *,
        other_weights: bool = False,
        advice: str = ", or allow it with other_weights=True",
    ) -> None:
        """Refuse a model with other heads or, unless ``other_weights`` is True, with other weights."""
        layers = plannable(proof)
        if layers != dict(self.layers):
            own, planned = (
                f"{len(x)} layers of {max((y.heads for y in x.values()), default=0)} heads in "
                f"{max((y.groups for y in x.values()), default=0)} groups"
                for x in (layers, self.layers)
            )
            raise MeasureError(
                f"the plan is of {self.model} with {planned}, but {proof.name} has {own} with full attention: make a "
                "plan of this model"
            )
        if not other_weights and fingerprint(model) != self.fingerprint:
            raise MeasureError(
                f"the plan is of {self.model}, and {proof.name} has other weights: make a plan of this model{advice}"
            )


def _check_types(plan: Plan) -> None:
    """Refuse a plan with a field of another type, or one that cannot be written as JSON."""
    for name in ("model", "fingerprint"):
        if not isinstance(value := getattr(plan, name), str):
            raise ConfigError(f"{name} of the plan is {_shown(value)}, not a string")
    for name in ("layers", "full", "scores", "provenance"):
        if not isinstance(value := getattr(plan, name), Mapping):
            raise ConfigError(f"{name} of the plan is {_shown(value)}, not a mapping")
    whole: list[tuple[str, Any]] = [("window", plan.window), ("sinks", plan.sinks)]
    for layer, count in plan.layers.items():
        whole += [
            ("a layer", layer),
            (f"heads of layer {layer}", count.heads),
            (f"groups of layer {layer}", count.groups),
        ]
    whole += [(f"full of layer {layer}", unit) for layer, chosen in plan.full.items() for unit in chosen]
    for name, number in whole:
        if not isinstance(number, int) or isinstance(number, bool):
            raise ConfigError(f"{name} of the plan is {_shown(number)}, not a whole number")
        check_whole_number(f"{name} of the plan", number)
    for layer, scores in plan.scores.items():
        for number in scores:
            if not isinstance(number, int | float) or isinstance(number, bool):
                raise ConfigError(f"scores of layer {layer} of the plan have {_shown(number)}, not a number")
            check_whole_number(f"a score of layer {layer} of the plan", number)
    for name in ("model", "fingerprint", "scores", "provenance"):
        value = getattr(plan, name)
        try:
            readable_json({str(key): x for key, x in value.items()} if isinstance(value, Mapping) else value)
        except (ConfigError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} of the plan cannot be written as JSON ({one_line(error)})") from error


def _shown(value: Any) -> str:
    """Return a value in a few characters of one line."""
    text = ascii(value) if not isinstance(value, int) or value.bit_length() <= 128 else "a large number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def plannable(proof: Proof) -> dict[int, LayerHeads]:
    """Return the numbers of heads of the layers with full causal attention, which a plan can limit."""
    return {
        layer.layout.layer: LayerHeads(layer.heads, layer.kv_heads)
        for layer in proof.layers
        if layer.window is None and not {"window", "not causal"} & set(layer.features)
    }


def fingerprint(model: nn.Module) -> str:
    """Return a hash of a model's weights that depends neither on their device nor on their precision.

    It includes some entries of each weight in bfloat16, so that it takes milliseconds; models trained further differ.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        # Adding zero makes the sign of zeros equal.
        digest.update(cast("Any", (sample.to(torch.bfloat16) + 0).float().cpu().numpy()).tobytes())
    return digest.hexdigest()
