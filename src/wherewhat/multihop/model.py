"""The laboratory's model: a small GPT-J whose attention can be looked at, edited and written by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.masking import Mask
from wherewhat.errors import ConfigError
from wherewhat.multihop.block import Block
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.dropout import Masks
from wherewhat.multihop.encodings import ENCODINGS
from wherewhat.multihop.places import Place, find_rotation, make_places

Edit = Callable[[int, Tensor], Tensor | None]
"""Given a layer's index and a tensor, something to take its place, or None to leave it."""

_SPREAD = 0.02
"""Standard deviation of GPT-J's initial weights."""


class LabModel(nn.Module):
    """GPT-J from scratch: parallel attention and MLP, interleaved RoPE, GELU, an output with weights of its own.

    There is no mode: dropout happens if a pass is given masks, and not otherwise.

    Attributes:
        config: What it was made from.
        embedding: Vectors of tokens, ``(vocabulary, width)``.
        positions: Vectors of positions, ``(positions, width)``; None unless the encoding is learned.
        blocks: The layers.
        norm: LayerNorm before the output.
        head: The output, with a bias.

    Raises:
        ConfigError: If the config's encoding does not fit its other options.
    """

    def __init__(self, config: LabConfig) -> None:
        super().__init__()
        self.config = config
        self.rotation = find_rotation(config)
        learned = ENCODINGS[config.encoding].learned
        self.embedding = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.positions = nn.Parameter(torch.empty(config.positions, config.width)) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm: nn.Module = nn.LayerNorm(config.width) if config.norm else nn.Identity()
        self.head = nn.Linear(config.width, config.vocabulary)
        self._places: tuple[tuple[int, torch.device, torch.dtype], list[Place]] | None = None
        make_places(config, 1, device=torch.device("cpu"), dtype=torch.float32)  # so that wrong options are told now
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
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

        Raises:
            ConfigError: If there are more tokens than a learned encoding has positions.
        """
        x = self.embed(tokens)
        if masks is not None:
            x = x * masks.embedding
        places = self.places(tokens.shape[1])
        for index, block in enumerate(self.blocks):
            if edit_stream is not None:
                x = _edited(x, edit_stream, index)
            # Nothing reads the other tokens of the last layer; who edits sees them all the same.
            last = index == len(self.blocks) - 1 and not all_tokens and edit is None and edit_stream is None
            within = None if edit is None else partial(edit, index)
            x = block(x, places[index], masks=None if masks is None else masks.layers[index], last=last, edit=within)
        if edit_stream is not None:
            x = _edited(x, edit_stream, len(self.blocks))
        if not all_tokens:
            x = x[:, -1]
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def attention(self, tokens: Tensor) -> list[LayerAttention]:
        """Every layer's attention over ``tokens`` ``(batch, n)``, as the model used it, on tensors of its own."""
        n = tokens.shape[1]
        x = self.embed(tokens)
        found = []
        for index, (block, place) in enumerate(zip(self.blocks, self.places(n), strict=True)):
            assert isinstance(block, Block)
            normed = block.norm(x)
            heads = block.project(normed, place, last=False)
            output = block.attend(heads, place, None)
            bias = () if place.bias is None else (place.bias,)
            found.append(
                LayerAttention(
                    layer=index,
                    name=f"blocks.{index}",
                    rot_q=heads[0],
                    rot_k=heads[1],
                    value=heads[2],
                    output=output,
                    scale=block.scale,
                    mask=Mask(causal=True, added=bias, device=tokens.device),
                    rotation=self.rotation,
                    positions=torch.arange(n, device=tokens.device),
                )
            )
            x = block.combine(x, normed, output, None)
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream that enters the first layer, ``(batch, n, width)``.

        Raises:
            ConfigError: If there are more tokens than a learned encoding has positions.
        """
        x = functional.embedding(tokens, self.embedding)
        if self.positions is None:
            return x
        n = tokens.shape[1]
        if n > len(self.positions):
            raise ConfigError(f"{n} tokens do not fit a learned encoding of {len(self.positions)} positions")
        return x + self.positions[:n]

    def places(self, n: int) -> list[Place]:
        """What positions do in each layer, for ``n`` tokens; made once for passes of the same length."""
        key = n, self.embedding.device, self.embedding.dtype
        if self._places is None or self._places[0] != key:
            self._places = key, make_places(self.config, n, device=key[1], dtype=key[2])
        return self._places[1]


def _edited(x: Tensor, edit: Edit, index: int) -> Tensor:
    replaced = edit(index, x)
    return x if replaced is None else replaced
