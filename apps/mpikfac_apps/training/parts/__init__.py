"""The parts of a training run: the data and the network, the optimizer, and the trainer."""
