"""Differential equations that a network solves, with known solutions and several optimizers."""
