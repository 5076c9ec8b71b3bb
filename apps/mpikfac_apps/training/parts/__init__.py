"""The parts of a training run: data and network, optimizer, and the training with its trainer."""
