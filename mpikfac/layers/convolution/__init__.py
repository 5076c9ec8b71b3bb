"""Describe convolutions of all kinds as matrices."""

from mpikfac.layers.convolution.layer import ConvLayer as ConvLayer
