"""The small model: a transformer whose attention can be read, edited and written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.errors import ConfigError
from wherewhat.lab.block import Block, Heads, Masks, make_norm
from wherewhat.lab.config import LabConfig
from wherewhat.lab.encodings import ENCODINGS, Place, find_rotation, make_places
from wherewhat.lab.kernels import is_half, look_up

Edit = Callable[[int, Tensor], Tensor | None]
"""Given a layer's index and a tensor, something to take its place, or None to leave it."""

Look = Callable[[LayerAttention], Tensor | None]
"""Given a layer's attention, an output ``(batch, n, heads, d)`` to take its output's place, or None to leave it."""

_SPREAD = 0.02
"""Standard deviation of GPT-J's initial weights."""


class LabModel(nn.Module):
    """GPT-J from scratch, or a relative: interleaved RoPE or another encoding, an output with weights of its own.

    There is no mode: dropout happens if a pass is given masks, and not otherwise.

    Attributes:
        config: What it was made from.
        embedding: Vectors of tokens, ``(vocabulary, width)``.
        positions: Vectors of positions, ``(positions, width)``; None unless the encoding is learned.
        blocks: The layers.
        norm: The norm before the output.
        head: The output, with a bias if ``biases`` is all.
    """

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.config = config
        self.rotation = find_rotation(config)
        learned = ENCODINGS[config.encoding].learned
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.positions = nn.Parameter(torch.empty(config.positions, config.width)) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=config.biases == "all")
        self._places: tuple[tuple[int, torch.device, torch.dtype], list[Place]] | None = None
        self.places(1)  # so that wrong options are told now
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if name.endswith(".phase"):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(std=_SPREAD, generator=generator)
            elif name.endswith(".bias"):
                parameter.zero_()

    def forward(
        self,
        tokens: Tensor,
        *,
        all_tokens: bool = False,
        masks: Masks | None = None,
        edit: Edit | None = None,
        edit_stream: Edit | None = None,
        positions: Tensor | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """Logits of the last token ``(batch, vocabulary)``, or of all tokens ``(batch, n, vocabulary)``.

        Args:
            tokens: Token ids, ``(batch, n)``.
            all_tokens: Logits of all tokens.
            masks: Factors of dropout, for training on the last token; none without.
            edit: Given a layer and what its attention gives before the output projection, ``(batch, n, heads, d)``,
                may return something in its place.
            edit_stream: The same for the residual stream ``(batch, n, width)`` that enters a layer; after the last
                layer it is called once more, with the number of layers.
            positions: Where the tokens are, ``(n,)``; 0, 1, 2 and so on if not given. Who comes first is seen by who
                comes later, wherever they are.
            look: Given every layer's attention in turn, may return an output in the place of its own, before ``edit``.
        """
        x = self.embed(tokens, positions)
        if masks is not None:
            x = x * masks.embedding
        places = self.places(tokens.shape[1], positions)
        whole = all_tokens or not (edit is None and edit_stream is None and look is None)
        for index, block in enumerate(self.blocks):
            if edit_stream is not None:
                x = _edited(x, edit_stream, index)
            # Nothing reads the other tokens of the last layer; who looks or edits sees them all the same.
            last = index == len(self.blocks) - 1 and not whole
            within = None if edit is None and look is None else self._within(index, places[index], edit, look)
            x = block(x, places[index], masks=None if masks is None else masks.layers[index], last=last, edit=within)
        if edit_stream is not None:
            x = _edited(x, edit_stream, len(self.blocks))
        if not all_tokens:
            x = x[:, -1]
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _within(
        self, index: int, place: Place, edit: Edit | None, look: Look | None
    ) -> Callable[[Heads, Tensor], Tensor]:
        """What is called with a layer's heads and output, and gives the output that is handed on."""

        def within(heads: Heads, output: Tensor) -> Tensor:
            if look is not None:
                replaced = look(self._describe(index, place, heads, output))
                output = output if replaced is None else replaced
            return output if edit is None else _edited(output, edit, index)

        return within

    def _describe(self, index: int, place: Place, heads: Heads, output: Tensor) -> LayerAttention:
        block = self.blocks[index]
        assert isinstance(block, Block)
        return LayerAttention(
            layer=index,
            name=f"blocks.{index}",
            rot_q=heads[0],
            rot_k=heads[1],
            value=heads[2],
            output=output,
            scale=block.scale,
            mask=Mask(causal=True, added=() if place.bias is None else (place.bias,), device=output.device),
            rotation=self.rotation,
            positions=place.positions,
        )

    @torch.no_grad()
    def attention(self, tokens: Tensor) -> list[LayerAttention]:
        """Every layer's attention over ``tokens`` ``(batch, n)``, as the model used it, on tensors of its own."""
        found: list[LayerAttention] = []
        self(tokens, look=found.append)
        return found

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """The residual stream that enters the first layer, ``(batch, n, width)``."""
        repeatable = self.embedding.is_cuda and is_half(self.embedding) and torch.is_grad_enabled()
        x = (look_up if repeatable else functional.embedding)(tokens, self.embedding)
        if self.positions is None:
            return x
        n = tokens.shape[1] if positions is None else int(positions.max()) + 1
        if n > len(self.positions):
            raise ConfigError(f"{n} tokens do not fit a learned encoding of {len(self.positions)} positions")
        return x + (self.positions[:n] if positions is None else self.positions[positions.to(x.device, torch.int64)])

    def places(self, n: int, positions: Tensor | None = None) -> list[Place]:
        """What positions do in each layer, for ``n`` tokens; made once for passes of the same length.

        Args:
            n: Number of tokens.
            positions: Where they are, ``(n,)``, if not at 0, 1, 2 and so on: then nothing is kept.
        """
        device, dtype = self.embedding.device, self.embedding.dtype
        if positions is not None:
            if positions.shape != (n,):
                raise ConfigError(f"positions of shape {tuple(positions.shape)} do not fit {n} tokens: give ({n},)")
            return make_places(self.config, positions, device=device, dtype=dtype)
        if self._places is None or self._places[0] != (n, device, dtype):
            self._places = (n, device, dtype), make_places(self.config, torch.arange(n), device=device, dtype=dtype)
        return self._places[1]


def _edited(x: Tensor, edit: Edit, index: int) -> Tensor:
    replaced = edit(index, x)
    return x if replaced is None else replaced


@contextmanager
def fused(model: LabModel, wanted: bool = True) -> Iterator[None]:
    """Run what comes before and after each layer's attention compiled; attention is left to its own kernel.

    Only for the time of the context, so that passes of other shapes do not compile theirs.

    Args:
        model: The model.
        wanted: Whether to; if not, nothing changes.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)] if wanted else []
    for block in blocks:
        block.__dict__["enter"] = torch.compile(block.enter, dynamic=False)
        block.__dict__["combine"] = torch.compile(block.combine, dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["enter"], block.__dict__["combine"]
