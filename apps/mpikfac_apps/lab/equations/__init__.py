"""Solve differential equations with known solutions, using a network and several optimizers."""
