"""Reductions of the largest gradients [DGC, Lin et al. 2018]."""
