"""Evaluate the network: track a run's best result, and test checkpoints after a run."""
