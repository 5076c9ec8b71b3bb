"""Gradients of layers computed directly from the error of the outputs."""
