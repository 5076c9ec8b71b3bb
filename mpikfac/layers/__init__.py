"""Describe supported modules as matrices, and uncovered tensors sent with the gradients."""

from __future__ import annotations

from mpikfac.layers.convolution.layer import ConvLayer
from mpikfac.layers.coverage import Coverage, Rule, cover, covered_shapes, find_uncovered, offers
from mpikfac.layers.embedding import EmbeddingLayer
from mpikfac.layers.kinds import KINDS, NORMS, Kinds, covered_base, maker_of, offer, same_as
from mpikfac.layers.layer import Attached, Layer, NotCovered
from mpikfac.layers.normalization import NormLayer
from mpikfac.layers.refusals import Refused
from mpikfac.layers.trained import Hook, Trained, take_model, trainer_of
from mpikfac.layers.transposed import TransposedLayer
from mpikfac.layers.uncovered import SKIP, VOTES, Counts, Other, Statistic, Votes, in_words

__all__ = [
    "KINDS",
    "NORMS",
    "SKIP",
    "VOTES",
    "Attached",
    "ConvLayer",
    "Counts",
    "Coverage",
    "EmbeddingLayer",
    "Hook",
    "Kinds",
    "Layer",
    "NormLayer",
    "NotCovered",
    "Other",
    "Refused",
    "Rule",
    "Statistic",
    "Trained",
    "TransposedLayer",
    "Votes",
    "cover",
    "covered_base",
    "covered_shapes",
    "find_uncovered",
    "in_words",
    "maker_of",
    "offer",
    "offers",
    "same_as",
    "take_model",
    "trainer_of",
]
