"""Reduce thin matrices instead of gradients [PowerSGD, Vogels et al. 2019]."""
