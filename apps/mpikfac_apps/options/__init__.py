"""The options of a training run: names, reading, the strategy that follows, and refused values."""
