"""The parts of a training run: data and network, optimizer, and the method with its trainer."""
