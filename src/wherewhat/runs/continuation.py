"""Log-probabilities of given continuations of a text, with one pass over the text for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.comparison import input_device, last_logits
from wherewhat.captures.proof import Proof
from wherewhat.errors import MeasureError
from wherewhat.runs.placement import computing, placed, reordered


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
