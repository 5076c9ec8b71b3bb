"""Parle: replicas that a spring holds together [Chaudhari et al. 2018]."""
