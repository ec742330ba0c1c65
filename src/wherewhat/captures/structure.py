"""What a model is made of, kept from one capture to the next, and what its proof depends on.

A capture is opened for every pass, so what only depends on the tree of modules is found once per tree. What a proof
depends on besides is read every time, in a fraction of a millisecond for a model of 32 layers.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.calls import Target, version_of
from wherewhat.captures.taps import interface_targets, rotary_targets
from wherewhat.errors import CaptureError

State = tuple[Any, ...]
"""What a proof depends on, to be compared with that of another time."""

_serial = itertools.count()
_TRAINING = operator.itemgetter("training")


@dataclass(frozen=True, eq=False)
class Structure:
    """The tree of a model's modules. It holds all of them but the model itself, which can be freed.

    Attributes:
        serial: A number of its own.
        parts: All modules below the model.
        names: Path of each module by its identity, cross-attention left out: distance and order mean nothing there.
        parameters: Names of the parameters of the model's forward function.
        frequencies_change: Whether its rotary frequencies depend on the length of the text.
        rotary: Where to watch rotary functions.
        interface: Where to watch transformers' attention interface.
        branches: Dictionaries of children that are not empty, with the children they held.
        leaves: Dictionaries of children that are empty.
        weights: Dictionaries of weights that are not empty.
        weightless: Dictionaries of weights that are empty.
        attributes: Attributes of all modules, the model's first.
        configs: Configurations of the modules.
        adapters: Attributes of modules that hold adapters.
    """

    serial: int
    parts: tuple[nn.Module, ...]
    names: dict[int, str]
    parameters: tuple[str, ...]
    frequencies_change: bool
    rotary: tuple[Target, ...]
    interface: tuple[Target, ...]
    branches: tuple[tuple[dict[str, Any], tuple[Any, ...]], ...]
    leaves: tuple[dict[str, Any], ...]
    weights: tuple[dict[str, Any], ...]
    weightless: tuple[dict[str, Any], ...]
    attributes: tuple[dict[str, Any], ...]
    configs: tuple[Any, ...]
    adapters: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """Look at a model."""
        named = dict(model.named_modules())
        modules = tuple(named.values())
        cross = {kind for kind in set(map(type, modules)) if re.search("cross", kind.__name__, re.IGNORECASE)}
        own = tuple(module.__dict__ for module in modules)
        children, weights = [x["_modules"] for x in own], [x["_parameters"] for x in own]
        configs = {id(x["config"]): x["config"] for x in own if "config" in x}
        return cls(
            serial=next(_serial),
            parts=modules[1:],
            names={id(module): name for name, module in named.items() if type(module) not in cross},
            parameters=tuple(inspect.signature(model.forward).parameters),
            frequencies_change=any(_by_length(config) for config in configs.values()),
            rotary=tuple(rotary_targets(modules)),
            interface=tuple(interface_targets(modules)),
            branches=tuple((x, tuple(x.values())) for x in children if x),
            leaves=tuple(x for x in children if not x),
            weights=tuple(x for x in weights if x),
            weightless=tuple(x for x in weights if not x),
            attributes=own,
            configs=tuple(configs.values()),
            adapters=tuple(x for x in own if "_active_adapter" in x),
        )

    def holds(self) -> bool:
        """Whether the tree still is what it was."""
        return (
            not any(self.leaves)
            and not any(self.weightless)
            and all(tuple(now.values()) == before for now, before in self.branches)
        )


_structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """The model's structure: that of last time as long as it is made of the same modules."""
    known = _structures.get(model)
    if known is None or not known.holds():
        known = Structure.of(model)
        if not any(target.owner is model for target in known.rotary):
            _structures[model] = known
    return known


def state_of(model: nn.Module) -> State:
    """Everything a proof of the model depends on: a proof made in another state is not one of this model.

    These are its modules, their classes and forward functions, adapters and attention implementation, where its weights
    are and how often they were written to, and autocast. Rotary frequencies and dtypes are compared in every pass.
    """
    structure = structure_of(model)
    check_mode(model, structure)
    weights = [x for held in structure.weights for x in held.values() if x is not None]
    own_parts = structure.attributes[1:]
    code = [(id(type(part)), id(own.get("forward"))) for part, own in zip(structure.parts, own_parts, strict=True)]
    adapters = [
        (str(own["_active_adapter"]), own.get("_disable_adapters"), str(own.get("merged_adapters")))
        for own in structure.adapters
    ]
    return (structure.serial, code, _places(weights), _versions(weights), adapters, *surroundings(structure))


def surroundings(structure: Structure) -> State:
    """What a proof depends on outside of the modules: attention functions and autocast."""
    names = [getattr(config, "_attn_implementation", None) for config in structure.configs]
    tables = [getattr(target.owner, target.name, None) for target in structure.interface]
    functions = [_bare(table.get(name)) for table in tables for name in names if name is not None and table is not None]
    functions += [_bare(getattr(target.owner, "eager_attention_forward", None)) for target in structure.interface]
    autocast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (names, functions, autocast)


def check_mode(model: nn.Module, structure: Structure) -> None:
    """Refuse a model of which any part is in training mode."""
    if any(map(_TRAINING, structure.attributes)):
        found = next(module for module in (model, *structure.parts) if module.training)
        where = "the model" if found is model else structure.names.get(id(found), type(found).__name__)
        raise CaptureError(f"{where} is in training mode, where dropout changes passes: call model.eval() first")


def _places(weights: list[Tensor]) -> list[int]:
    """Where each weight is; one of another dtype or on another device is elsewhere."""
    try:
        return [weight.data_ptr() for weight in weights]
    except RuntimeError:  # quantised formats that are made of several tensors
        return [id(weight) for weight in weights]


def _versions(weights: list[Tensor]) -> list[int]:
    """How often each weight was written to, as far as that is counted."""
    try:
        return [weight._version for weight in weights]
    except RuntimeError:  # not in inference mode
        return [version_of(weight) for weight in weights]


def _bare(function: Any) -> int:
    """Identity of a function, observed or not."""
    return id(getattr(function, "__wrapped__", function))


def _by_length(config: Any) -> bool:
    """Whether a configuration asks for rotary frequencies that depend on the length of the text."""
    return any(kind in str(getattr(config, "rope_parameters", "")) for kind in ("'dynamic'", "'longrope'"))
