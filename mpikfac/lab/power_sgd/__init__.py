"""Reductions of thin matrices in place of gradients [PowerSGD, Vogels et al. 2019]."""
