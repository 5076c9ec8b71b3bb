"""Transformer blocks made of linear layers, which K-FAC covers, and a vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with several heads; a single linear layer computes query, key and value.

    Args:
        causal: whether a position attends only to itself and earlier positions.
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.project(x).unflatten(2, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Attention, then two linear layers; each of these two parts is pre-norm and has a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp1, self.mlp2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp2(F.gelu(self.mlp1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A transformer on image patches that classifies their mean token [Beyer et al. 2022]."""

    def __init__(
        self, classes: int, channels: int, size: int, patch: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*[EncoderBlock(width, heads, 2 * width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))
