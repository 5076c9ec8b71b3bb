"""Programs that predict: a measured machine, step times of strategies, and advice."""
