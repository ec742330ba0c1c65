"""Training steps on a CPU and on a GPU, and learning rates, batches and seeds as functions of the step."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat_lab.block import MaskDrawer, Masks
from wherewhat_lab.checkpoints import TrainState
from wherewhat_lab.config import Precision, Training
from wherewhat_lab.model import LabModel, fused


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


class Steps(ABC):
    """Training steps on one kind of device.

    Args:
        model: The model to train, in place.
        tokens: Training sequences, ``(count, n)``.
        answers: Their answers, ``(count,)``; None to predict every next token.
        config: Options of the training.
        order: Sequences of every step, ``(steps, batch)``; those of ``batch_order`` by default.

    Attributes:
        losses: Loss of every step, ``(steps,)``; 0 for steps that have not run.
    """

    def __init__(
        self, model: LabModel, tokens: Tensor, answers: Tensor | None, config: Training, *, order: Tensor | None
    ) -> None:
        device = model.embedding.device
        self._model, self._config = model, config
        self._tokens, self._answers = tokens.to(device), None if answers is None else answers.to(device)
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._sequences = (batch_order(config, len(tokens)) if order is None else order).to(device)
        self._n = tokens.shape[1] - (answers is None)  # without answers, the last token is a target only
        self._tables = model.position_tables(self._n)  # kept for a graph: the model's cache holds one length only
        self._optimizers: list[torch.optim.AdamW] = []
        self.losses = torch.zeros(config.steps, device=device)

    @abstractmethod
    def run(self, step: int) -> None:
        """Run one step."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and memory."""

    def record(self, function: Callable[[], None]) -> None:
        """Call a function that reads the model."""
        function()

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return AdamW's first and second moments, by the weights' names."""
        states = {p: state for optimizer in self._optimizers for p, state in optimizer.state.items()}
        mean = {name: states[parameter]["exp_avg"] for name, parameter in self._named.items()}
        return mean, {name: states[parameter]["exp_avg_sq"] for name, parameter in self._named.items()}

    def _add_optimizer(self, names: list[str], rate: float | Tensor, state: TrainState | None) -> None:
        """Add a fused AdamW of some weights; with a tensor as its rate, one that a CUDA graph can capture.

        Its moments are zeros, or those of a saved state.
        """
        config = self._config
        optimizer = torch.optim.AdamW(
            [self._named[name] for name in names],
            lr=rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=isinstance(rate, Tensor),
        )
        for name in names:
            parameter = self._named[name]
            optimizer.state[parameter] = {
                "step": torch.tensor(float(0 if state is None else state.step), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            if state is not None:
                optimizer.state[parameter]["exp_avg"].copy_(state.mean[name])
                optimizer.state[parameter]["exp_avg_sq"].copy_(state.square[name])
        self._optimizers.append(optimizer)

    def _clip_gradients(self) -> None:
        """Clip the norm of all gradients together, if the training has a limit."""
        if self._config.arithmetic.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._config.arithmetic.clip_norm)


class CpuSteps(Steps):
    """Training steps on a CPU; arguments as for :class:`Steps`.

    Args:
        threads: Number of threads, each of which gets a part of the batch.
        state: State to resume from; None to start.
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
        super().__init__(model, tokens, answers, config, order=order)
        self._order = self._sequences.tensor_split(threads, dim=1)
        self._rates = learning_rates(config).tolist()
        sizes = [part.shape[1] for part in self._order]
        dropout = model.config.dropout
        self._drawers = [MaskDrawer(model.config, batch=size, n=self._n) for size in sizes] if dropout else []
        self._generators = [torch.Generator() for _ in sizes]
        self._shares = _balanced([p.numel() for p in self._parameters], threads)
        names = list(self._named)
        for share in self._shares:
            self._add_optimizer([names[i] for i in share], config.learning_rate, state)
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, step: int) -> None:
        """Run one step."""
        parts = range(len(self._order))
        with products(self._config.arithmetic.products):
            contributions = list(self._pool.map(lambda part: self._gradients(step, part), parts))
        self.losses[step] = sum(loss for loss, _ in contributions)
        list(self._pool.map(lambda part: self._sum(part, [grads for _, grads in contributions]), parts))
        self._clip_gradients()
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
            first, *others = (gradients[index] for gradients in grads)
            for other in others:
                first += other
            self._parameters[index].grad = first

    def _update(self, step: int, part: int) -> None:
        """Update one share of the weights."""
        for group in self._optimizers[part].param_groups:
            group["lr"] = self._rates[step]
        self._optimizers[part].step()

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


_WARM_UP = 3
"""Steps run before the graph is captured, and then undone: libraries select kernels and allocate memory in them."""


class GpuSteps(Steps):
    """Training steps on a GPU, each with its data and optimiser one CUDA graph; arguments as for :class:`Steps`.

    Launching the thousand small kernels of a step one by one takes far longer than running them. A CUDA graph launches
    all of them at once. Everything that differs from step to step is on the device: a counter, the order of the
    sequences, the learning rates, and the seed of dropout, which the host sets.

    Args:
        state: State to resume from; None to start.
        graph: Replay a CUDA graph; otherwise launch every kernel, which gives the same results more slowly.
    """

    def __init__(
        self,
        model: LabModel,
        tokens: Tensor,
        answers: Tensor | None,
        config: Training,
        *,
        state: TrainState | None = None,
        graph: bool = True,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(model, tokens, answers, config, order=order)
        device = model.embedding.device
        self._rates = learning_rates(config).float().to(device)
        self._rate = torch.zeros((), device=device)
        self._add_optimizer(list(self._named), self._rate, state)
        self._optimizer = self._optimizers[0]
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device)
        self._drawer = (
            MaskDrawer(model.config, batch=config.batch, n=self._n, device=device) if model.config.dropout else None
        )
        self._graph = self._capture() if graph else None
        self._counter.fill_(0 if state is None else state.step)
        self.losses.zero_()

    def run(self, step: int) -> None:
        """Run one step, whose index is the counter on the device."""
        self._generator.manual_seed(derived_seed(self._config.seed, "dropout", step))
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()

    def _advance(self) -> None:
        rows = self._sequences.index_select(0, self._counter)[0]
        self._rate.copy_(self._rates.index_select(0, self._counter)[0])
        masks = None if self._drawer is None else self._drawer.draw(self._generator)
        answers = None if self._answers is None else self._answers.index_select(0, rows)
        with products(self._config.arithmetic.products), fused(self._model, self._config.arithmetic.fused):
            loss = summed_loss(self._model, self._tokens.index_select(0, rows), answers, self._config, masks)
            loss = loss / self._config.batch
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        self._clip_gradients()
        self._optimizer.step()
        self.losses.index_copy_(0, self._counter, loss.detach()[None])
        self._counter.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the graph of one step; weights and moments are restored afterwards."""
        moments = (value for state in self._optimizer.state.values() for value in state.values())
        changing = [*(p.detach() for p in self._parameters), *moments]
        before = [value.clone() for value in changing]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(min(_WARM_UP, self._config.steps)):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        for value, old in zip(changing, before, strict=True):
            value.copy_(old)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._advance()
        return graph

    def close(self) -> None:
        """Free the graph's memory."""
        self._graph = None
        self._optimizer.zero_grad(set_to_none=True)


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Set the precision of float32 matrix products in all threads inside the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=config.arithmetic.half, cache_enabled=False):
        if answers is not None:
            return functional.cross_entropy(model(tokens, masks=masks), answers, reduction="sum")
        tokens = tokens.long()
        logits = model(tokens[:, :-1], all_tokens=True, masks=masks)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * len(tokens)


def _balanced(sizes: list[int], parts: int) -> list[list[int]]:
    """Divide the indices of ``sizes`` into parts with about equal sums."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = sums.index(min(sums))
        shares[lightest].append(index)
        sums[lightest] += sizes[index]
    return shares
