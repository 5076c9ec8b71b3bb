"""Recommendation: clicks with categories, embedding tables dealt to ranks, and the training."""
