"""Describe supported modules as matrices, and uncovered tensors sent with the gradients."""

from __future__ import annotations

from mpikfac.layers.convolution.layer import ConvLayer
from mpikfac.layers.coverage import (
    KINDS,
    NORMS,
    Coverage,
    Kinds,
    Rule,
    cover,
    covered_shapes,
    find_uncovered,
)
from mpikfac.layers.embedding import EmbeddingLayer
from mpikfac.layers.layer import Layer
from mpikfac.layers.normalization import NormLayer
from mpikfac.layers.uncovered import VOTES, Counts, Other, Statistic, Votes

__all__ = [
    "KINDS",
    "NORMS",
    "VOTES",
    "ConvLayer",
    "Counts",
    "Coverage",
    "EmbeddingLayer",
    "Kinds",
    "Layer",
    "NormLayer",
    "Other",
    "Rule",
    "Statistic",
    "Votes",
    "cover",
    "covered_shapes",
    "find_uncovered",
]
