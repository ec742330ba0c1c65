"""Twins of a model, to compare it with: freshly initialised, or with shuffled query and key projections."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from wherewhat.errors import LoadError
from wherewhat.models.projections import Part, query_key_parts
from wherewhat.models.suitability import out_of_reach


def random_twin(config: Any, *, seed: int, attn_implementation: str | None = None, **options: Any) -> Any:
    """A model that was never trained: its own initialisation, drawn from a seed.

    Drawn on the CPU in float32, so that every device and dtype gets the same numbers. Global random
    state is neither read nor changed.

    Args:
        config: transformers config.
        seed: Seed of the draw.
        attn_implementation: Passed on to transformers.
        options: Further options of `AutoModelForCausalLM.from_config`.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # The CPU's generator alone: torch.manual_seed would also reseed every accelerator.
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation, **options
        )


def shuffle_query_key(model: torch.nn.Module, *, seed: int) -> None:
    """Permute, in place, the entries of every layer's query and key projection matrices.

    Query entries move among queries and key entries among keys of one layer: the distribution of each
    matrix stays, its structure goes. Values, outputs and all biases are untouched. Each permutation
    depends on the seed, the layer's name and the role alone, so it is the same on every device.

    Args:
        model: A causal language model.
        seed: Seed of the permutations.
    """
    done: set[tuple[int, str]] = set()
    for name, parts in query_key_parts(model).items():
        for number, part in enumerate(parts):
            parameter = getattr(part.owner, part.parameter)
            # A layer that is used at several depths is shuffled once.
            if (id(parameter), part.role) in done:
                continue
            done.add((id(parameter), part.role))
            _permute(parameter, part, _generator(seed, f"{name}/{part.role}/{number}"), name)


def _permute(parameter: torch.nn.Parameter, part: Part, generator: torch.Generator, name: str) -> None:
    if not parameter.is_floating_point() or out_of_reach(parameter):
        raise LoadError(f"cannot shuffle {name}: its weights are quantised or offloaded; load it without either")
    old = parameter.detach()
    chosen = old if part.rows is None else old.index_select(part.dim, part.rows.to(old.device))
    order = torch.randperm(chosen.numel(), generator=generator).to(old.device)
    mixed = chosen.flatten()[order].view_as(chosen)
    # A new tensor, never a write into the old one: that may be a file mapped into memory.
    new = mixed if part.rows is None else old.index_copy(part.dim, part.rows.to(old.device), mixed)
    parameter.data = new.contiguous()


def _generator(seed: int, place: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{place}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
