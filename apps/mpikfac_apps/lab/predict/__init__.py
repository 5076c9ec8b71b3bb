"""Measure a machine, predict step times of strategies on it, and give advice."""
