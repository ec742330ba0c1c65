"""Control models: a new random initialisation, or shuffled query and key projections."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from wherewhat.errors import LoadError
from wherewhat.models.projections import ProjectionPart, query_key_parts
from wherewhat.models.suitability import is_readable


def random_control(config: Any, *, seed: int, attn_implementation: str | None = None, **options: Any) -> Any:
    """Return an untrained model with its own initialisation.

    Weights are drawn on the CPU in float32, so that they are the same for every device and dtype. Global random state
    is neither read nor changed.

    Args:
        config: transformers config.
        seed: Seed of the initialisation.
        attn_implementation: Passed to transformers.
        options: Further options of `AutoModelForCausalLM.from_config`.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Only the CPU's generator: torch.manual_seed would also reseed every accelerator.
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation, **options
        )


def shuffle_query_key(model: torch.nn.Module, *, seed: int) -> None:
    """Permute, in place, the entries of every layer's query and key projection matrices.

    Entries are permuted within the queries and within the keys of a layer, which keeps the distribution of each matrix
    and removes its structure. Values, outputs and all biases are not changed. Each permutation depends only on the
    seed, the layer's name and the role, so it is the same on every device.

    Args:
        model: A causal language model.
        seed: Seed of the permutations.
    """
    # Weights of some formats get their final shape in the first pass only.
    if getattr(model, "hf_quantizer", None) is not None:
        raise LoadError(
            f"cannot shuffle {type(model).__name__}: its weights are quantised; use the checkpoint before that"
        )
    done: set[tuple[int, str]] = set()
    for name, parts in query_key_parts(model).items():
        for number, part in enumerate(parts):
            parameter = getattr(part.owner, part.parameter)
            # A layer that is used at several depths is shuffled once.
            if (id(parameter), part.role) in done:
                continue
            done.add((id(parameter), part.role))
            if not parameter.is_floating_point() or not is_readable(parameter):
                raise LoadError(
                    f"cannot shuffle {name}: its weights are quantised or offloaded; load it without either"
                )
            digest = hashlib.sha256(f"{seed}/{name}/{part.role}/{number}".encode()).digest()
            generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            _permute(parameter, part, generator)


def _permute(parameter: torch.nn.Parameter, part: ProjectionPart, generator: torch.Generator) -> None:
    old = parameter.detach()
    chosen = old if part.rows is None else old.index_select(part.dim, part.rows.to(old.device))
    order = torch.randperm(chosen.numel(), generator=generator).to(old.device)
    mixed = chosen.flatten()[order].view_as(chosen)
    # A new tensor: the old one may be a file mapped into memory.
    new = mixed if part.rows is None else old.index_copy(part.dim, part.rows.to(old.device), mixed)
    parameter.data = new.contiguous()
