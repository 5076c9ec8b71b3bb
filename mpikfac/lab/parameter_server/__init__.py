"""Clients that train with servers of weights, without waiting for each other."""
