"""Layers whose channels are divided among the ranks of a group."""
