"""The small model: a transformer whose attention can be read, edited and written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.errors import ConfigError
from wherewhat_lab.block import Block, Heads, Masks, make_norm
from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import ENCODINGS, PositionTables, find_rotation, make_position_tables
from wherewhat_lab.kernels import is_half, look_up

Edit = Callable[[int, Tensor], Tensor | None]
"""Function of a layer's index and the stream that enters it, which returns a replacement of the stream, or None."""

EditAttention = Callable[[LayerAttention], Tensor | None]
"""Function of a layer's attention that returns a replacement of its output ``(batch, n, heads, d)``, or None."""

_SPREAD = 0.02
"""Standard deviation of GPT-J's initial weights."""


class LabModel(nn.Module):
    """A small transformer: GPT-J by default, with a choice of position encoding, block and biases.

    There is no training mode: dropout is applied if and only if a pass is given masks.

    Attributes:
        config: Its options.
        embedding: Vectors of tokens, ``(vocabulary, width)``.
        positions: Vectors of positions, ``(positions, width)``; None unless the encoding is learned.
        blocks: The layers.
        norm: The norm before the output.
        head: The output projection, not tied to the embedding; with a bias if ``biases`` is all.
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
        self._tables: tuple[tuple[int, torch.device, torch.dtype], list[PositionTables]] | None = None
        self.position_tables(1)  # raises an error for invalid options
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
        edit_stream: Edit | None = None,
        positions: Tensor | None = None,
        edit_attention: EditAttention | None = None,
    ) -> Tensor:
        """Return logits of the last token ``(batch, vocabulary)``, or of all tokens ``(batch, n, vocabulary)``.

        Args:
            tokens: Token ids, ``(batch, n)``.
            all_tokens: Return logits of all tokens.
            masks: Dropout factors, for training on the last token; None for no dropout.
            edit_stream: Function of a layer's index and the residual stream ``(batch, n, width)`` that enters it, which
                may return a replacement; after the last layer it is called once more, with the number of layers.
            positions: Positions of the tokens, ``(n,)``; 0, 1, 2 and so on by default. The causal mask follows the
                order of the tokens, not their positions.
            edit_attention: Function of every layer's attention that may return a replacement of its output.
        """
        x = self.embed(tokens, positions)
        if masks is not None:
            x = x * masks.embedding
        tables = self.position_tables(tokens.shape[1], positions)
        whole = all_tokens or not (edit_stream is None and edit_attention is None)
        for index, block in enumerate(self.blocks):
            if edit_stream is not None:
                x = _edited(x, edit_stream, index)
            # Nothing reads the other tokens of the last layer; edits get them nevertheless.
            last = index == len(self.blocks) - 1 and not whole
            edit = None if edit_attention is None else partial(self._edit_output, edit_attention, index, tables[index])
            x = block(x, tables[index], masks=None if masks is None else masks.layers[index], last=last, edit=edit)
        if edit_stream is not None:
            x = _edited(x, edit_stream, len(self.blocks))
        if not all_tokens:
            x = x[:, -1]
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _edit_output(
        self, edit: EditAttention, index: int, tables: PositionTables, heads: Heads, output: Tensor
    ) -> Tensor | None:
        block = self.blocks[index]
        assert isinstance(block, Block)
        attention = LayerAttention(
            layer=index,
            name=f"blocks.{index}",
            rot_q=heads[0],
            rot_k=heads[1],
            value=heads[2],
            output=output,
            scale=block.scale,
            mask=Mask(causal=True, added=() if tables.bias is None else (tables.bias,), device=output.device),
            rotation=self.rotation,
            positions=tables.positions,
        )
        return edit(attention)

    @torch.no_grad()
    def attention(self, tokens: Tensor) -> list[LayerAttention]:
        """Return every layer's attention over ``tokens`` ``(batch, n)``."""
        layers: list[LayerAttention] = []
        self(tokens, edit_attention=layers.append)
        return layers

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the residual stream that enters the first layer, ``(batch, n, width)``."""
        repeatable = self.embedding.is_cuda and is_half(self.embedding) and torch.is_grad_enabled()
        x = (look_up if repeatable else functional.embedding)(tokens, self.embedding)
        if self.positions is None:
            return x
        n = tokens.shape[1] if positions is None else int(positions.max()) + 1
        if n > len(self.positions):
            raise ConfigError(f"{n} tokens do not fit a learned encoding of {len(self.positions)} positions")
        return x + (self.positions[:n] if positions is None else self.positions[positions.to(x.device, torch.int64)])

    def position_tables(self, n: int, positions: Tensor | None = None) -> list[PositionTables]:
        """Return each layer's position tables for ``n`` tokens, cached for the last length.

        Args:
            n: Number of tokens.
            positions: Positions ``(n,)`` other than 0, 1, 2 and so on; their tables are not cached.
        """
        device, dtype = self.embedding.device, self.embedding.dtype
        if positions is not None:
            if positions.shape != (n,):
                raise ConfigError(f"positions of shape {tuple(positions.shape)} do not fit {n} tokens: give ({n},)")
            return make_position_tables(self.config, positions, device=device, dtype=dtype)
        if self._tables is None or self._tables[0] != (n, device, dtype):
            self._tables = (
                (n, device, dtype),
                make_position_tables(self.config, torch.arange(n), device=device, dtype=dtype),
            )
        return self._tables[1]


def _edited(x: Tensor, edit: Edit, index: int) -> Tensor:
    replaced = edit(index, x)
    return x if replaced is None else replaced


@contextmanager
def fused(model: LabModel, wanted: bool = True) -> Iterator[None]:
    """Compile what comes before and after each layer's attention, which keeps its own kernel, inside the context.

    Outside the context passes of other shapes run without compilation, and nothing is compiled unless ``wanted``.
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
