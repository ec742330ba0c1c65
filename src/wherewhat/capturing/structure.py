"""What a model is made of, kept from one capture to the next, and what its proof depends on.

A capture is opened for every pass, so what only depends on the tree of modules is found once per tree. What a proof
depends on besides is read every time: it takes a fraction of a millisecond for a model of 32 layers.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing.interface_tap import interface_targets
from wherewhat.capturing.rotary_tap import rotary_targets
from wherewhat.capturing.swaps import Target
from wherewhat.errors import CaptureError

State = tuple[Any, ...]
"""What a proof depends on, to be compared with that of another time."""

_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Structure:
    """The tree of a model's modules; of the model itself nothing is kept, so that it can be freed.

    Attributes:
        serial: A number of its own.
        parts: All modules below the model, parents first.
        names: Path of each module by its identity, cross-attention left out: distance and order mean nothing there.
        rotary: Where to watch rotary functions.
        interface: Where to watch transformers' attention interface.
    """

    serial: int
    parts: tuple[nn.Module, ...]
    names: dict[int, str]
    rotary: tuple[Target, ...]
    interface: tuple[Target, ...]


_structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """The model's structure: the one of last time as long as it is made of the same modules."""
    parts = tuple(_below(model))
    known = _structures.get(model)
    if known is not None and len(known.parts) == len(parts) and all(map(_same, known.parts, parts)):
        return known
    modules = (model, *parts)
    cross = {kind for kind in set(map(type, modules)) if re.search("cross", kind.__name__, re.IGNORECASE)}
    found = Structure(
        serial=next(_serial),
        parts=parts,
        names={id(module): name for name, module in model.named_modules() if type(module) not in cross},
        rotary=tuple(rotary_targets(modules)),
        interface=tuple(interface_targets(modules)),
    )
    if not any(target.owner is model for target in found.rotary):
        _structures[model] = found
    return found


def state_of(model: nn.Module) -> State:
    """Everything a proof of the model depends on: a proof made in another state is not one of this model.

    These are its modules, adapters and attention implementation, where its weights are, of which dtype, and how often
    they were written to, and autocast. Rotary frequencies are compared in every pass.

    Raises:
        CaptureError: If it is in training mode.
    """
    structure = structure_of(model)
    check_mode(model, structure)
    configs: dict[int, Any] = {}
    adapters: list[Any] = []
    weights: list[Any] = []
    for module in (model, *structure.parts):
        own = module.__dict__
        config = own.get("config")
        if config is not None:
            configs[id(config)] = config
        if "_active_adapter" in own:
            merged = own.get("merged_adapters") or ()
            adapters.append((str(own["_active_adapter"]), own.get("_disable_adapters"), tuple(map(str, merged))))
        for weight in own["_parameters"].values():
            if weight is not None:
                weights.append(_weight_state(weight))
    implementations = [getattr(config, "_attn_implementation", None) for config in configs.values()]
    autocast = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (structure.serial, tuple(weights), tuple(implementations), tuple(adapters), tuple(autocast))


def check_mode(model: nn.Module, structure: Structure) -> None:
    """Refuse a model of which any part is in training mode.

    Raises:
        CaptureError: With the first such part.
    """
    for module in (model, *structure.parts):
        if module.training:
            where = "the model" if module is model else structure.names.get(id(module), type(module).__name__)
            raise CaptureError(f"{where} is in training mode, where dropout changes passes: call model.eval() first")


def _weight_state(weight: Tensor) -> tuple[Any, ...]:
    """Where a weight is, its dtype and how often it was written to, as far as it tells."""
    version = -1 if weight.is_inference() else weight._version
    try:
        return (weight.data_ptr(), version, weight.dtype, weight.device)
    except RuntimeError:  # tensors of quantised formats that are made of several
        return (id(weight), version, weight.dtype, weight.device)


def _below(model: nn.Module) -> Iterator[nn.Module]:
    """Every module below a model once, parents first."""
    seen = {id(model)}
    stack = [model]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
                yield child


def _same(one: nn.Module, other: nn.Module) -> bool:
    return one is other
