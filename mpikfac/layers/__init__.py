"""Each supported module as matrices, and everything else that travels with the gradients."""

from mpikfac.layers.convolutional import ConvLayer
from mpikfac.layers.covering import KINDS, NORMS, Kinds, Rule, cover, covered_shapes, uncovered
from mpikfac.layers.embedding import EmbeddingLayer
from mpikfac.layers.layer import Layer
from mpikfac.layers.normalization import NormLayer
from mpikfac.layers.others import VOTES, Other, Statistic, Votes

__all__ = [
    "KINDS",
    "NORMS",
    "VOTES",
    "ConvLayer",
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
    "uncovered",
]
