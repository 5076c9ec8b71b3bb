"""Describe convolutions of all kinds as matrices."""

from __future__ import annotations

from mpikfac.layers.convolution.layer import ConvLayer

__all__ = ["ConvLayer"]
