"""Predictions of a network with the uncertainty of its weights."""
