"""Gradients of layers from the error of the outputs alone."""
