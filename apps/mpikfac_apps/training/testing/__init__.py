"""Tests of the network: the best test of a run, and tests of checkpoints after a run."""
