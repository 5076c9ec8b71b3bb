"""Recommendation: clicks with categories, embedding tables distributed over ranks, training."""
