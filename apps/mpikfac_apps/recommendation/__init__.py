"""Recommendation: read clicks, distribute embedding tables over ranks, and train a DLRM."""
