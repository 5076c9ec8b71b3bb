"""Reduce only the largest gradient elements [DGC, Lin et al. 2018]."""
