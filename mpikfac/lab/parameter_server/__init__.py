"""Clients that train with parameter servers, without waiting for each other."""
