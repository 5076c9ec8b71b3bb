"""Train a population of networks that searches for hyperparameters while it trains."""
