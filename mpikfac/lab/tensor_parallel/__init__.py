"""Layers whose channels are dealt out over a group of ranks."""
