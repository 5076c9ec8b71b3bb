"""Clients that train with servers of weights, and wait for no other client."""
