"""Small language models, a transformer and an LSTM, which score candidates for the next token.

Both networks take windows of tokens `[n, positions]` and return scores `[n, tokens, positions]`,
the shape that cross entropy expects. The scores at a position do not depend on later tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mpikfac_apps.problems.vit import EncoderBlock

SCALE = 0.02  # standard deviation of the initial weights [Radford et al. 2019]


class GPT(nn.Module):
    """A pre-norm transformer with learned positional embeddings [Radford et al. 2019].

    The embedding and the last layer do not share weights.

    Args:
        tokens: the number of different tokens.
        positions: the maximum number of tokens in a window.
    """

    def __init__(self, tokens: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(SCALE * torch.randn(positions, width))
        blocks = [EncoderBlock(width, heads, hidden=4 * width, causal=True) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)
        self.apply(draw)
        for block in blocks:  # keeps the sum over all shortcuts from growing with depth
            for last in (block.attention.out, block.mlp2):
                nn.init.normal_(last.weight, std=SCALE / math.sqrt(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position[: x.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def draw(module: nn.Module) -> None:
    """Draw the initial weights of a linear layer or an embedding; biases are initialised to 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=SCALE)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class LSTM(nn.Module):
    """A single LSTM layer [Hochreiter & Schmidhuber 1997], whose initial state is 0.

    The layer is an `nn.LSTMCell` called at every position, because K-FAC covers cells.

    Args:
        tokens: the number of different tokens.
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.cell, self.head = nn.LSTMCell(width, width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for embedded in self.embedding(x).unbind(1):
            state = self.cell(embedded, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1)).transpose(1, 2)


def gpt_small(classes: int, channels: int) -> nn.Module:
    """Return a GPT with 0.5 million weights, for `classes` tokens and windows of `channels`."""
    return GPT(classes, channels, width=96, depth=4, heads=4)


def lstm_small(classes: int, channels: int) -> nn.Module:  # noqa: ARG001 (as all networks)
    """Return an LSTM with 0.2 million weights, for `classes` tokens."""
    return LSTM(classes, width=128)
