"""Sums of thin matrices in the place of sums of gradients [PowerSGD, Vogels et al. 2019]."""
