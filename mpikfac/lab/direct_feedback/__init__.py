"""Compute layers' gradients directly from the error of the model's outputs."""
