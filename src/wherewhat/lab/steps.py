"""Training steps on a CPU, and learning rates, batches and seeds as functions of the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat.lab.block import MaskDrawer, Masks
from wherewhat.lab.checkpoints import TrainState
from wherewhat.lab.config import Precision, Training
from wherewhat.lab.model import LabModel


def learning_rates(config: Training) -> Tensor:
    """Return the learning rate of every step, ``(steps,)`` float64.

    It rises linearly from 0 during the warm-up, then falls to 0 linearly or, by option, along a cosine.
    """
    step = torch.arange(config.steps, dtype=torch.float64)
    rising = step / max(1, config.warmup)
    falling = (config.steps - step) / max(1, config.steps - config.warmup)
    if config.cosine:
        falling = (1 - (torch.pi * falling).cos()) / 2
    return config.learning_rate * torch.where(step < config.warmup, rising, falling)


def batch_order(config: Training, count: int) -> Tensor:
    """Return the sequences of every step, ``(steps, batch)``: one permutation of all ``count`` after the other."""
    needed = config.steps * config.batch
    epochs = [
        torch.randperm(count, generator=torch.Generator().manual_seed(derived_seed(config.seed, "order", epoch)))
        for epoch in range(-(-needed // count))
    ]
    return torch.cat(epochs)[:needed].view(config.steps, config.batch)


def derived_seed(seed: int, *path: str | int) -> int:
    """Return a seed for one use, derived from ``seed`` by hashing, the same on every machine."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class Steps(Protocol):
    """Interface of the training steps on one kind of device."""

    @property
    def losses(self) -> Tensor:
        """Loss of every step, ``(steps,)``; 0 for steps that have not run."""

    def run(self, step: int) -> None:
        """Run one step."""

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return AdamW's first and second moments, by the weights' names."""

    def record(self, function: Callable[[], None]) -> None:
        """Call a function that reads the model."""

    def close(self) -> None:
        """Free threads and memory."""


class CpuSteps:
    """Training steps on a CPU.

    Args:
        model: The model to train, in place.
        tokens: Training sequences, ``(count, n)``.
        answers: Their answers, ``(count,)``; None to predict every next token.
        config: Options of the training.
        threads: Number of threads, each of which gets a part of the batch.
        state: State to resume from; None to start.
        order: Sequences of every step, ``(steps, batch)``; those of ``batch_order`` by default.
    """

    def __init__(
        self,
        model: LabModel,
        tokens: Tensor,
        answers: Tensor | None,
        config: Training,
        *,
        threads: int,
        state: TrainState | None = None,
        order: Tensor | None = None,
    ) -> None:
        self._model, self._tokens, self._answers, self._config = model, tokens, answers, config
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        order = batch_order(config, len(tokens)) if order is None else order
        self._order = order.tensor_split(threads, dim=1)
        self._rates = learning_rates(config).tolist()
        self.losses = torch.zeros(config.steps)
        sizes = [part.shape[1] for part in self._order]
        n = read_length(tokens, answers)
        self._drawers = [MaskDrawer(model.config, batch=size, n=n) for size in sizes] if model.config.dropout else []
        self._generators = [torch.Generator() for _ in sizes]
        self._shares = _balanced([p.numel() for p in self._parameters], threads)
        self._optimizers = [
            make_optimizer([self._parameters[i] for i in share], config, config.learning_rate) for share in self._shares
        ]
        for optimizer, share in zip(self._optimizers, self._shares, strict=True):
            start_moments(optimizer, [self._names[i] for i in share], state)
        model.position_tables(n)
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, step: int) -> None:
        """Run one step."""
        parts = range(len(self._order))
        with products(self._config.products):
            found = list(self._pool.map(lambda part: self._gradients(step, part), parts))
        self.losses[step] = sum(loss for loss, _ in found)
        list(self._pool.map(lambda part: self._sum(part, [grads for _, grads in found]), parts))
        clip_gradients(self._parameters, self._config)
        list(self._pool.map(lambda part: self._update(step, part), parts))

    def _gradients(self, step: int, part: int) -> tuple[float, tuple[Tensor, ...]]:
        """Return the contribution of one part of the batch to the loss and to the gradient of every weight."""
        rows = self._order[part][step]
        masks = None
        if self._drawers:
            seed = derived_seed(self._config.seed, "dropout", step, part)
            masks = self._drawers[part].draw(self._generators[part].manual_seed(seed))
        answers = None if self._answers is None else self._answers[rows]
        loss = summed_loss(self._model, self._tokens[rows], answers, self._config, masks) / self._config.batch
        return float(loss.detach()), torch.autograd.grad(loss, self._parameters)

    def _sum(self, part: int, grads: list[tuple[Tensor, ...]]) -> None:
        """Sum the gradients of one share of the weights."""
        for index in self._shares[part]:
            first, *others = (found[index] for found in grads)
            for other in others:
                first += other
            self._parameters[index].grad = first

    def _update(self, step: int, part: int) -> None:
        """Update one share of the weights."""
        for group in self._optimizers[part].param_groups:
            group["lr"] = self._rates[step]
        self._optimizers[part].step()

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return AdamW's first and second moments, by the weights' names."""
        states = [optimizer.state for optimizer in self._optimizers]
        return read_moments(zip(self._names, self._parameters, strict=True), states)

    def record(self, function: Callable[[], None]) -> None:
        """Call a function that reads the model, with torch's original number of threads."""
        torch.set_num_threads(self._before)
        try:
            function()
        finally:
            torch.set_num_threads(1)

    def close(self) -> None:
        """End the threads and restore torch's number of threads."""
        self._pool.shutdown()
        torch.set_num_threads(self._before)


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Set the precision of float32 matrix products in all threads inside the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def read_length(tokens: Tensor, answers: Tensor | None) -> int:
    """Return the number of input tokens of each sequence: without answers, its last token is a target only."""
    return tokens.shape[1] - (answers is None)


def summed_loss(
    model: LabModel, tokens: Tensor, answers: Tensor | None, config: Training, masks: Masks | None
) -> Tensor:
    """Return the loss summed over sequences; that of a sequence is the mean over its answers.

    Args:
        model: The model.
        tokens: Sequences, ``(batch, n)``.
        answers: Answers at the last tokens, ``(batch,)``; None to predict every next token.
        config: Options of the training.
        masks: Dropout factors; None for no dropout.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.half, cache_enabled=False):
        if answers is not None:
            return functional.cross_entropy(model(tokens, masks=masks), answers, reduction="sum")
        tokens = tokens.long()
        logits = model(tokens[:, :-1], all_tokens=True, masks=masks)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * len(tokens)


def clip_gradients(parameters: list[torch.nn.Parameter], config: Training) -> None:
    """Clip the norm of all gradients together, if the training has a limit."""
    if config.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)


def make_optimizer(parameters: list[torch.nn.Parameter], config: Training, rate: float | Tensor) -> torch.optim.AdamW:
    """Return a fused AdamW; on a GPU one that a CUDA graph can capture."""
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=isinstance(rate, Tensor),
    )


def start_moments(optimizer: torch.optim.AdamW, names: list[str], state: TrainState | None) -> None:
    """Set AdamW's moments to zeros, or to those of a saved state."""
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        on_gpu = parameter.device if parameter.is_cuda else "cpu"
        optimizer.state[parameter] = {
            "step": torch.tensor(float(0 if state is None else state.step), device=on_gpu),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        if state is not None:
            optimizer.state[parameter]["exp_avg"].copy_(state.mean[name])
            optimizer.state[parameter]["exp_avg_sq"].copy_(state.square[name])


def read_moments(named: Iterable[tuple[str, Tensor]], states: list[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return AdamW's moments by name, from the states of one or more optimizers."""
    mean, square = {}, {}
    for name, parameter in named:
        found = next(state[parameter] for state in states if parameter in state)
        mean[name], square[name] = found["exp_avg"], found["exp_avg_sq"]
    return mean, square


def _balanced(sizes: list[int], parts: int) -> list[list[int]]:
    """Divide the indices of ``sizes`` into parts with about equal sums."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = sums.index(min(sums))
        shares[lightest].append(index)
        sums[lightest] += sizes[index]
    return shares
