"""Groups of ranks that train separate models, which learn from each other's predictions."""
