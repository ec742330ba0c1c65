"""The residual stream as a sum: what each head adds to it, and what that adds to the logit of the next token.

The parts are found by running the model: the module that projects the outputs of a layer's heads, the norm after it, if
any (Gemma 3), the factors of what a block adds (Granite), and the norm and the output head that read the stream. The
sum over all parts must be the model's own logit; a model in which it is not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.layer_proofs import input_device, random_prompt
from wherewhat.captures.layout import CaptureLayout
from wherewhat.captures.proof import PROMPT_TOKENS, Proof, capture
from wherewhat.errors import CaptureError
from wherewhat.options import short_repr

_ROUNDINGS = 4
"""Roundings of the residual stream that the sum of a block's parts may be away from what the block adds."""

_SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest distance of the sum of all parts from the logits, relative to the largest; in half precision 0.05."""

_PROBE = 16.0
"""Size of the entries that a norm's gain and offset are read with: its epsilon is nothing beside their square."""


def block_list(model: nn.Module, layout: CaptureLayout) -> tuple[list[nn.Module], dict[int, int]]:
    """Return all blocks of the model in order, and the index among them of each layer's."""
    matches = {plan.layer: re.match(r"(.*)\.(\d+)\.", plan.name) for plan in layout.layers}
    lists = {None if match is None else match[1] for match in matches.values()}
    names = [plan.name for plan in layout.layers]
    path = lists.pop()
    if path is None or lists or len(set(names)) < len(names):
        raise CaptureError(f"{names[0]} is not in its own block of one list: layers cannot be changed separately")
    children = dict(model.get_submodule(path).named_children())
    order = list(children)
    return list(children.values()), {layer: order.index(match[2]) for layer, match in matches.items() if match}


@dataclass(frozen=True)
class _Call:
    """First hidden states that a module was given and that it returned, copied."""

    module: nn.Module
    given: Tensor
    returned: Tensor


def _first(values: Sequence[Any]) -> Tensor | None:
    """Return the first floating-point tensor with a token axis."""
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1), None)


@contextmanager
def _recorded(modules: Sequence[nn.Module]) -> Iterator[dict[int, _Call]]:
    """Record the last call of each module inside the context, by its id, in the order in which they end.

    Tensors are copied: some models add to them in place.
    """
    calls: dict[int, _Call] = {}
    given: dict[int, Tensor] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = _first([kwargs.get("hidden_states"), *args, *kwargs.values()])
        if x is not None:
            given[id(module)] = x.detach().clone()

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        y = _first(output if isinstance(output, tuple | list) else [output])
        if y is not None and id(module) in given:
            calls.pop(id(module), None)
            calls[id(module)] = _Call(module, given.pop(id(module)), y.detach().clone())

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield calls


@dataclass(frozen=True)
class _FrozenNorm:
    """A norm ``scale · gain · (x - mean of x) + offset``, or without the mean, as a linear map at its own scale.

    Attributes:
        module: The module.
        gain: ``(width,)`` float64.
        offset: ``(width,)`` float64.
        centred: Whether it subtracts the mean, as LayerNorm does and RMSNorm does not.
    """

    module: nn.Module
    gain: Tensor
    offset: Tensor
    centred: bool

    @classmethod
    def find(cls, call: _Call) -> _FrozenNorm | None:
        """Return a module as a norm, if it is one on the tokens ``(1, n, width)`` of a call."""
        width = call.given.shape[-1]
        if call.returned.shape != call.given.shape or width % 2:
            return None
        signs = torch.ones_like(call.given[:, :1])
        signs[..., 1::2] = -1
        try:
            with torch.no_grad():
                plus, minus = (call.module(x * _PROBE).double()[0, 0] for x in (signs, -signs))
        except (RuntimeError, TypeError, ValueError):
            return None
        gain, offset = (plus - minus) / 2 * signs[0, 0].double(), (plus + minus) / 2
        norms = [cls(call.module, gain, offset, centred) for centred in (False, True)]
        errors = [float(norm._error(call)) for norm in norms]
        best = min(range(2), key=lambda index: errors[index])
        return norms[best] if errors[best] <= _ROUNDINGS * torch.finfo(call.given.dtype).eps else None

    def _scale(self, call: _Call) -> Tensor:
        """Return the scale of each token, ``(…, n, 1)``, from what the norm returned."""
        x = self._moved(call.given.double()) * self.gain
        products = ((call.returned.double() - self.offset) * x).sum(-1, keepdim=True)
        return products / x.square().sum(-1, keepdim=True).clamp_min(1e-300)

    def _moved(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _error(self, call: _Call) -> Tensor:
        """Return the distance of the frozen map from what the norm returned, relative to that."""
        ours = self._moved(call.given.double()) * self.gain * self._scale(call) + self.offset
        theirs = call.returned.double()
        error: Tensor = vector_norm(ours - theirs) / vector_norm(theirs).clamp_min(1e-300)
        return error

    def before(self, direction: Tensor, call: _Call) -> Tensor:
        """Return the direction ``(…, n, width)`` of the input whose product is that of ``direction`` of the output."""
        return self._moved(direction.to(self.gain.device) * self.gain * self._scale(call))


def _weights(module: nn.Module, given: Tensor, direction: Tensor) -> Tensor:
    """Return the direction of a linear module's input whose product is that of ``direction`` of its output.

    Args:
        module: The module.
        given: Its input ``(n, width)``.
        direction: ``(k, n, width of the output)``.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = given.clone().expand(len(direction), *given.shape).clone().requires_grad_()
        y = module(x)
        (gradient,) = torch.autograd.grad(y, x, direction.to(y.dtype))
    pulled: Tensor = gradient.double()
    return pulled


@dataclass(frozen=True)
class _Writer:
    """How a layer adds to the residual stream: ``factor · norm(projection(outputs of heads)) + other``.

    Attributes:
        heads: Number of heads.
        projection: The output projection.
        norm: The norm after it, if any.
        factor: Factor of what the heads add.
        other: Module that returns the rest of what the block adds; None if there is none.
        other_factor: Its factor.
    """

    heads: int
    projection: nn.Module
    norm: _FrozenNorm | None
    factor: float
    other: nn.Module | None
    other_factor: float

    @property
    def modules(self) -> list[nn.Module]:
        """Modules whose calls are needed."""
        norm = None if self.norm is None else self.norm.module
        return [module for module in (self.projection, norm, self.other) if module is not None]


@dataclass(frozen=True)
class DirectLogits:
    """Logits of the next tokens of a text, less their means over the vocabulary, as a sum over parts of the model.

    Attributes:
        heads: What each head adds directly, ``(heads, n - 1)`` by layer.
        shuffled: The same for the text's tokens in any order in place of the next one, mean over all orders.
        others: What embedding, feed-forward layers, biases and layers without attention add, ``(n - 1,)``.
        logits: The sum, as the model computes it, ``(n - 1,)``.
    """

    heads: dict[int, Tensor]
    shuffled: dict[int, Tensor]
    others: Tensor
    logits: Tensor

    __repr__ = short_repr

    def difference(self) -> Tensor:
        """Return the largest distance of the sum from the logits, relative to the largest."""
        total = self.others + sum(x.sum(0) for x in self.heads.values())
        return (total - self.logits).abs().max() / self.logits.abs().max().clamp_min(1e-30)


class ResidualStream:
    """How the parts of a model add to its logits.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.

    Raises:
        CaptureError: If the logits are not such a sum.
    """

    def __init__(self, model: Any, proof: Proof) -> None:
        self._model = model
        self._blocks, at = block_list(model, proof.layout)
        self._head: nn.Module = model.get_output_embeddings()
        if self._head is None:
            raise CaptureError("the model has no output head: its logits are no sum over heads")
        ids = random_prompt(model, PROMPT_TOKENS)
        outputs: dict[int, Tensor] = {}

        def keep(attention: LayerAttention) -> None:
            outputs[attention.layer] = attention.output.detach().clone()

        modules = [module for module in model.modules() if module is not model]
        with torch.no_grad(), _recorded(modules) as calls, capture(model, keep, proof=proof):
            logits = model(input_ids=ids, use_cache=False).logits
        if any(id(module) not in calls for module in (self._head, *self._blocks)):
            raise CaptureError("a block or the output head reads and returns no hidden states: the logits are no sum")
        names = {id(module): name for name, module in model.named_modules()}
        inside = {id(module) for block in self._blocks for module in block.modules()}
        self._norm = self._final_norm([calls[key] for key in calls if key not in inside], calls)
        self._factor = self._head_factor(calls[id(self._head)].returned, logits)
        self._writers = {
            layer: _find_writer(calls, self._blocks[at[layer]], output, names) for layer, output in outputs.items()
        }
        self._others = [block for index, block in enumerate(self._blocks) if index not in at.values()]
        self.direct_logits(ids)

    def _final_norm(self, calls: Sequence[_Call], by_module: dict[int, _Call]) -> _FrozenNorm:
        """Return the norm between the last block and the output head."""
        for block, following in zip(self._blocks, self._blocks[1:], strict=False):
            if not torch.equal(by_module[id(block)].returned, by_module[id(following)].given):
                raise CaptureError("a block changes what the block before it returned: the residual stream is no sum")
        last, read = by_module[id(self._blocks[-1])].returned, by_module[id(self._head)].given
        for call in calls:
            if call.given.shape == last.shape and torch.equal(call.given, last) and torch.equal(call.returned, read):
                norm = _FrozenNorm.find(call)
                if norm is not None:
                    return norm
        raise CaptureError("no RMSNorm or LayerNorm leads from the last block to the output head")

    def _head_factor(self, returned: Tensor, logits: Tensor) -> float:
        """Return the factor between the output head and the logits."""
        if torch.equal(returned.to(logits.dtype), logits):
            return 1.0
        ours, theirs = returned.double(), logits.double()
        factor = (ours * theirs).sum() / ours.square().sum()
        error = float((factor * ours - theirs).norm() / theirs.norm())
        if not error <= _ROUNDINGS * torch.finfo(logits.dtype).eps:
            raise CaptureError("the logits are not those of the output head: they are capped or changed after it")
        return float(factor)

    def direct_logits(self, ids: Tensor) -> DirectLogits:
        """Return the logits of the next tokens of a text ``(1, n)`` as a sum over heads and other parts.

        Raises:
            CaptureError: If the sum is not the logits, or a module has no gradient.
        """
        ids = ids.to(input_device(self._model))
        modules = [self._norm.module, self._head, self._blocks[0], *self._others]
        modules += [module for writer in self._writers.values() for module in writer.modules]
        with torch.no_grad(), _recorded(modules) as calls:
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        if any(id(module) not in calls for module in modules):
            raise CaptureError("a module that adds to the logits was not run: the model took another path")
        try:
            direct = self._attributed(calls, logits, ids[0, 1:].to(logits.device))
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"a projection of heads or the output head has no gradient: {error}") from error
        difference, allowed = float(direct.difference()), _SAME.get(calls[id(self._head)].given.dtype, 5e-2)
        if not difference <= allowed:
            raise CaptureError(
                f"the sum over heads and other parts differs from the logits by {difference:.2g} of the largest: "
                "the model adds them in another way"
            )
        return direct

    def _attributed(self, calls: dict[int, _Call], logits: Tensor, targets: Tensor) -> DirectLogits:
        device = logits.device
        read = calls[id(self._head)].given[0, :-1]
        reads = self._factor * torch.cat([_reading(self._head, x, y) for x, y in _chunks(read, targets)])
        # The mean over the orders of the text's tokens is that of the directions, at the scale of each query.
        directions = torch.stack([reads, reads.mean(0).expand_as(reads)])
        with torch.no_grad():
            bias = self._factor * self._head(torch.zeros_like(read[:1])).double()[0].to(device)

        def product(direction: Tensor, x: Tensor) -> Tensor:
            return (direction.to(x.device) * x.double()).sum(-1).to(device)

        others = product(reads, self._norm.offset) + bias[targets] - bias.mean()
        directions = self._norm.before(directions, _before_last(calls[id(self._norm.module)]))
        others = others + product(directions[0], calls[id(self._blocks[0])].given[0, :-1])
        for block in self._others:
            added = calls[id(block)].returned.double() - calls[id(block)].given.double()
            others = others + product(directions[0], added[0, :-1])
        heads: dict[int, Tensor] = {}
        shuffled: dict[int, Tensor] = {}
        for layer, writer in self._writers.items():
            call = _before_last(calls[id(writer.projection)])
            written = writer.factor * directions
            if writer.norm is not None:
                others = others + product(written[0], writer.norm.offset)
                written = writer.norm.before(written, _before_last(calls[id(writer.norm.module)]))
            with torch.no_grad():
                others = others + product(written[0], writer.projection(torch.zeros_like(call.given[:, :1]))[0])
            if writer.other is not None:
                returned = calls[id(writer.other)].returned.reshape(1, -1, directions.shape[-1])[0, :-1]
                others = others + writer.other_factor * product(directions[0], returned)
            written = written.to(call.given.device)
            parts = _weights(writer.projection, call.given[0], written) * call.given[0].double()
            parts = torch.unflatten(parts, -1, (writer.heads, -1)).sum(-1).mT.to(device)
            heads[layer], shuffled[layer] = parts[0], parts[1]
        mean = logits.mean(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).double()
        return DirectLogits(heads, shuffled, others, logits.gather(-1, targets[:, None])[:, 0].double() - mean)


def _before_last(call: _Call) -> _Call:
    """Return the call without the last token, which has no next one."""
    return _Call(call.module, *(x.reshape(1, -1, x.shape[-1])[:, :-1] for x in (call.given, call.returned)))


_TOKENS = 256
"""Tokens whose logits are differentiated at once."""


def _chunks(read: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(read, _TOKENS), torch.split(targets.to(read.device), _TOKENS), strict=True)


def _reading(head: nn.Module, read: Tensor, targets: Tensor) -> Tensor:
    """Return the direction in which the output head reads each target's logit less the mean, ``(n, width)``."""
    with torch.no_grad():
        count = head(read[:1]).shape[-1]
    wanted = read.new_full((1, len(read), count), -1 / count)
    return _weights(head, read, wanted.scatter_add_(-1, targets[None, :, None], read.new_ones(1, len(read), 1)))[0]


def _find_writer(calls: dict[int, _Call], block: nn.Module, output: Tensor, names: dict[int, str]) -> _Writer:
    """Return how a layer with the outputs ``(1, n, heads, d_v)`` of heads adds to the stream; raise if it does not."""
    name = names[id(block)]
    own = calls[id(block)]
    added = (own.returned.double() - own.given.double())[0]
    size = float((own.returned.double().square().sum() + own.given.double().square().sum()).sqrt())
    allowed = _ROUNDINGS * torch.finfo(own.returned.dtype).eps * size
    inner = {id(module) for module in block.modules() if module is not block}
    parts = [call for key, call in calls.items() if key in inner and call.returned.numel() == added.numel()]
    flat = output.reshape(-1, output.shape[-2] * output.shape[-1])

    def reads(call: _Call, x: Tensor) -> bool:
        return call.given.numel() == x.numel() and torch.equal(call.given.reshape(x.shape), x)

    # The shortest name first: an adapter wraps the projection that it adapts.
    projections = sorted((call for call in parts if reads(call, flat)), key=lambda call: len(names[id(call.module)]))
    if not projections:
        raise CaptureError(f"no projection in {name} reads the outputs of its heads as they are")
    best: tuple[float, _Writer] | None = None
    for projection in projections:
        after: list[tuple[_FrozenNorm | None, Tensor]] = [(None, projection.returned)]
        for call in parts:
            if call is not projection and reads(call, projection.returned):
                norm = _FrozenNorm.find(call)
                after += [] if norm is None else [(norm, call.returned)]
        for norm, written in after:
            for other in (None, *(call for call in parts if call.returned is not written)):
                terms = [x.double().reshape(added.shape) for x in (written, *([other.returned] if other else []))]
                factors = [1.0] * len(terms)
                error = _distance(factors, terms, added)
                if error > allowed:
                    factors = _fitted(terms, added)
                    error = _distance(factors, terms, added)
                if error <= allowed and (best is None or error < best[0]):
                    factor, other_factor = (*factors, 1.0)[:2]
                    module = None if other is None else other.module
                    heads = output.shape[-2]
                    best = (error, _Writer(heads, projection.module, norm, factor, module, other_factor))
    if best is None:
        raise CaptureError(f"{name} does not add its attention and its feed-forward layer to the hidden states")
    return best[1]


def _distance(factors: Sequence[float], terms: Sequence[Tensor], added: Tensor) -> float:
    """Return how far a sum of terms is from what a block adds."""
    return float((sum(factor * x for factor, x in zip(factors, terms, strict=True)) - added).norm())


def _fitted(terms: Sequence[Tensor], added: Tensor) -> list[float]:
    """Return the factors with which terms come closest to what a block adds."""
    columns = torch.stack([x.flatten() for x in terms], 1)
    solved: Tensor = torch.linalg.lstsq(columns.mT @ columns, columns.mT @ added.flatten()[:, None]).solution
    return [float(x) for x in solved[:, 0]]
