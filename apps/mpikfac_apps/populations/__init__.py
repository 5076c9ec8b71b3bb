"""Train a population of networks that searches for numbers of the training while it trains."""
