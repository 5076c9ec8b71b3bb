"""Recommendation: clicks with categories, distributed embedding tables, and training."""
