"""Shared by all training programs: the loop over steps, checkpoints, run directory, metrics."""
