"""Predictions of a network that take the uncertainty of its weights into account."""
