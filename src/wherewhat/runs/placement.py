"""Run a model at chosen positions, with hidden states in another order, or over continuations of a text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.comparison import input_device, last_logits, random_prompt
from wherewhat.captures.proof import Proof
from wherewhat.errors import CaptureError, ConfigError, MeasureError, one_line
from wherewhat.models.loaded import max_positions

_PROBE_TOKENS = 8


def placed(model: Any, ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a forward pass over ``ids`` ``(batch, n)`` that put the tokens at ``positions`` ``(n,)``.

    Without a mask, transformers takes every step other than 1 for the start of another text and masks what is before.
    A mask of ones marks it as one text; windows and the causal mask follow the order of the tokens.
    """
    if positions.shape != ids.shape[1:]:
        raise ConfigError(f"{positions.shape[-1]} positions were given for {ids.shape[1]} tokens: give one for each")
    low, high = int(positions.min()), int(positions.max())
    if low < 0:
        raise ConfigError(f"position {low} is negative: positions start at 0")
    limit, hard = max_positions(model)
    if hard and limit is not None and high >= limit:
        raise ConfigError(f"position {high} is beyond the last of the model's {limit} positions: ask for fewer tokens")
    return {
        "position_ids": positions.to(ids.device)[None].expand(ids.shape),
        "attention_mask": torch.ones_like(ids),
    }


@contextmanager
def computing(model: Any, positions: Tensor | None) -> Iterator[None]:
    """Turn the error of a model that cannot run at given positions into a CaptureError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        if positions is None:
            raise
        reason = one_line(error)
        raise CaptureError(
            f"{type(model).__name__} cannot be run at other positions ({reason}): leave kinds of positions out"
        ) from error


def positions_refused(model: Any) -> str:
    """Return in one line why the positions of tokens cannot be set in a model; empty if they can.

    A short pass with reversed positions must differ from a plain one, and one with the usual positions must not.
    """
    kind = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return f"{kind} takes no position_ids: positions cannot be perturbed; leave kinds of positions out"
    ids = random_prompt(model, _PROBE_TOKENS)
    usual = torch.arange(_PROBE_TOKENS, device=ids.device)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits.float()
        same = model(input_ids=ids, use_cache=False, **placed(model, ids, usual)).logits.float()
        other = model(input_ids=ids, use_cache=False, **placed(model, ids, usual.flip(0))).logits.float()
    size = float(plain.abs().max().clamp_min(1e-30))
    rounding = 1e-4 if next(model.parameters()).element_size() >= 4 else 2e-2
    if float((same - plain).abs().max()) > rounding * size:
        return f"{kind} changes its output when it is given its default positions: positions cannot be perturbed"
    if float((other - plain).abs().max()) <= 1e-6 * size:
        return f"{kind} ignores position_ids (ALiBi or no positions): leave kinds of positions out"
    return ""


@contextmanager
def reordered(model: nn.Module, proof: Proof, orders: Mapping[int, Tensor]) -> Iterator[None]:
    """Permute the hidden states that enter blocks until the context ends.

    Orders ``(n,)`` are by index of the block: position i takes the hidden state of token ``order[i]``.
    """
    # All blocks are looked up before the first hook, so that an error leaves the model unchanged.
    blocks = {layer: _block(model, proof, layer) for layer in orders}
    with ExitStack() as stack:
        for layer, block in blocks.items():
            hook = _permuting(layer, orders[layer])
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _block(model: nn.Module, proof: Proof, layer: int) -> nn.Module:
    """Return the block of a layer's attention: the numbered module that contains it."""
    plans = [plan for plan in proof.layout.layers if plan.layer == layer]
    if not plans:
        known = sorted(plan.layer for plan in proof.layout.layers)
        raise ConfigError(f"there is no layer {layer} with attention: choose one from {known[0]} to {known[-1]}")
    name = plans[0].name
    found = re.match(r"(.*\.\d+)\.", name)
    if found is None or sum(plan.name == name for plan in proof.layout.layers) > 1:
        raise CaptureError(f"{name} is not in its own block: its input cannot be reordered")
    return model.get_submodule(found[1])


def _permuting(layer: int, order: Tensor) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = (kwargs.get("hidden_states"), *args)
        before = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)
        if before is None or before.ndim != 3 or before.shape[1] != len(order):
            shape = "nothing" if before is None else f"a tensor {tuple(before.shape)}"
            raise CaptureError(f"layer {layer} is entered by {shape}, not by hidden states of {len(order)} tokens")
        after = before[:, order.to(before.device)]
        return (
            tuple(after if x is before else x for x in args),
            {name: after if x is before else x for name, x in kwargs.items()},
        )

    return hook


def continued(
    model: Any,
    proof: Proof,
    ids: Tensor,
    continuations: Sequence[Sequence[int]],
    *,
    positions: Tensor | None = None,
    orders: Mapping[int, Tensor] | None = None,
    shared: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each continuation of a text.

    The text is run once and its keys and values are cached for the continuations, which follow in one batch; those of
    a single token need no second pass. Where a model caches anything but all keys and values (windows, recurrent
    states), each longer continuation is run with its text.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof, which names its layers.
        ids: The text, ``(1, n)``.
        continuations: Token ids of each.
        positions: Positions of the tokens, ``(n + longest continuation - 1,)``; consecutive by default.
        orders: Order in which the text's hidden states enter layers, ``(n,)`` by layer.
        shared: Whether continuations share one pass; False for models that depend on the length of the text.

    Returns:
        Log-probabilities ``(continuations,)`` float64 in nats, and whether each is the model's greedy continuation,
        ``(continuations,)`` bool.
    """
    if not ids.shape[1] or not continuations or not all(map(len, continuations)):
        raise MeasureError("a text and each of its continuations must have tokens: give at least one of each")
    ids = ids.to(input_device(model))
    run = _Run(model, proof, ids, positions, orders or {})
    with torch.no_grad(), computing(model, positions):
        found = run.together(continuations) if shared else [run.alone(one) for one in continuations]
    return torch.stack([x for x, _ in found]), torch.stack([x for _, x in found])


class _Run:
    """A text and how the model is run on it."""

    def __init__(
        self, model: Any, proof: Proof, ids: Tensor, positions: Tensor | None, orders: Mapping[int, Tensor]
    ) -> None:
        self.model, self.proof, self.ids, self.positions, self.orders = model, proof, ids, positions, orders
        self.n = ids.shape[1]

    def together(self, continuations: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        longer = [one for one in continuations if len(one) > 1]
        output = self._pass(self.ids, keep=1, use_cache=bool(longer))
        first = output.logits[0, -1:]
        cache = getattr(output, "past_key_values", None)
        if longer and not _keeps_all(cache, self.n):
            return [scored(first, one) if len(one) == 1 else self.alone(one) for one in continuations]
        after = iter(self._after(cache, longer) if longer else ())
        return [scored(torch.cat([first, next(after)]) if len(one) > 1 else first, one) for one in continuations]

    def _after(self, cache: Any, continuations: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits after the tokens of continuations ``(continuations, longest - 1, vocabulary)``."""
        count = max(map(len, continuations)) - 1
        # Padding follows all tokens that are scored, so the causal mask hides it.
        rows = [[*one[:-1], *[0] * (count + 1 - len(one))] for one in continuations]
        tokens = torch.tensor(rows, device=self.ids.device)
        cache.batch_repeat_interleave(len(rows))
        given: dict[str, Any] = {}
        if self.positions is not None:
            given = placed(self.model, tokens, self.positions[self.n : self.n + count])
            given["attention_mask"] = tokens.new_ones(len(rows), self.n + count)
        logits: Tensor = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **given).logits
        return logits

    def alone(self, continuation: Sequence[int]) -> tuple[Tensor, Tensor]:
        more = torch.tensor([continuation[:-1]], dtype=self.ids.dtype, device=self.ids.device)
        output = self._pass(torch.cat([self.ids, more], 1), keep=len(continuation), use_cache=False)
        return scored(output.logits[0, -len(continuation) :], continuation)

    def _pass(self, ids: Tensor, *, keep: int, use_cache: bool) -> Any:
        count = ids.shape[1]
        given: dict[str, Any] = last_logits(self.model, keep)
        if self.positions is not None:
            given |= placed(self.model, ids, self.positions[:count])
        behind = torch.arange(self.n, count)
        orders = {layer: torch.cat([order.cpu(), behind]) for layer, order in self.orders.items()}
        with reordered(self.model, self.proof, orders) if orders else nullcontext():
            return self.model(input_ids=ids, use_cache=use_cache, **given)


def scored(logits: Tensor, continuation: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a continuation and whether it is greedy, from the logits of its tokens."""
    rows = logits[: len(continuation)].float()
    tokens = torch.tensor(continuation, device=rows.device)
    logprobs = rows.log_softmax(-1).gather(1, tokens[:, None])
    return logprobs.double().sum().cpu(), (rows.argmax(-1) == tokens).all().cpu()


def _keeps_all(cache: Any, n: int) -> bool:
    """Return whether a cache holds the keys and values of n tokens in every layer, and nothing else."""
    from transformers.cache_utils import DynamicLayer

    layers: list[Any] = getattr(cache, "layers", None) or []
    return bool(layers) and all(type(layer) is DynamicLayer and layer.get_seq_length() == n for layer in layers)
