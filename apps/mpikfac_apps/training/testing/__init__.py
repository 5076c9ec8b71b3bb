"""Evaluate the network: the best result of a run, and checkpoints after a run."""
