"""Groups of ranks that train models of their own towards each other's answers."""
