"""Ranks that decompose factors for the ranks that train [LBANN]."""
