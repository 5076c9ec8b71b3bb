"""Parle: replicas coupled by a spring [Chaudhari et al. 2018]."""
