"""Training steps on a GPU: a whole step, data and optimiser included, as a CUDA graph.

Launching the thousand small kernels of a step one by one takes far longer than running them. A CUDA graph launches all
of them at once. Everything that differs from step to step is on the device: a counter, the order of the sequences, the
learning rates, and the seed of dropout, which the host sets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wherewhat.lab.block import MaskDrawer
from wherewhat.lab.checkpoints import TrainState
from wherewhat.lab.config import Training
from wherewhat.lab.model import LabModel, fused
from wherewhat.lab.steps import (
    batch_order,
    clip_gradients,
    derived_seed,
    learning_rates,
    make_optimizer,
    products,
    read_length,
    read_moments,
    start_moments,
    summed_loss,
)

_WARM_UP = 3
"""Steps run before the graph is captured, and then undone: libraries select kernels and allocate memory in them."""


class GpuSteps:
    """Training steps on a GPU.

    Args:
        model: The model to train, in place, on the GPU.
        tokens: Training sequences, ``(count, n)``.
        answers: Their answers, ``(count,)``; None to predict every next token.
        config: Options of the training.
        state: State to resume from; None to start.
        graph: Replay a CUDA graph; otherwise launch every kernel, which gives the same results more slowly.
        order: Sequences of every step, ``(steps, batch)``; those of ``batch_order`` by default.
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
        device = model.embedding.device
        self._model, self._config = model, config
        self._tokens, self._answers = tokens.to(device), None if answers is None else answers.to(device)
        self._names = [name for name, _ in model.named_parameters()]
        self._order = (batch_order(config, len(tokens)) if order is None else order).to(device)
        self._rates = learning_rates(config).float().to(device)
        self._rate = torch.zeros((), device=device)
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(self._parameters, config, self._rate)
        start_moments(self._optimizer, self._names, state)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._generator = torch.Generator(device)
        n = read_length(tokens, answers)
        self._tables = model.position_tables(n)  # kept for the graph: the model's cache holds one length only
        self._drawer = (
            MaskDrawer(model.config, batch=config.batch, n=n, device=device) if model.config.dropout else None
        )
        self.losses = torch.zeros(config.steps, device=device)
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
        rows = self._order.index_select(0, self._counter)[0]
        self._rate.copy_(self._rates.index_select(0, self._counter)[0])
        masks = None if self._drawer is None else self._drawer.draw(self._generator)
        answers = None if self._answers is None else self._answers.index_select(0, rows)
        with products(self._config.products), fused(self._model, self._config.fused):
            loss = summed_loss(self._model, self._tokens.index_select(0, rows), answers, self._config, masks)
            loss = loss / self._config.batch
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(self._parameters, self._config)
        self._optimizer.step()
        self.losses.index_copy_(0, self._counter, loss.detach()[None])
        self._counter.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return the graph of one step; weights and moments are restored afterwards."""
        moments = (value for state in self._optimizer.state.values() for value in state.values())
        changing = [*(p.detach() for p in self._model.parameters()), *moments]
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

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return AdamW's first and second moments, by the weights' names."""
        return read_moments(zip(self._names, self._model.parameters(), strict=True), [self._optimizer.state])

    def record(self, function: Callable[[], None]) -> None:
        """Call a function that reads the model."""
        function()

    def close(self) -> None:
        """Free the graph's memory."""
        self._graph = None
        self._optimizer.zero_grad(set_to_none=True)
