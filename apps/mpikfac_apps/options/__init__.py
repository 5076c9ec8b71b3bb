"""The options of a run: how they are named, read and checked, and the strategy they describe."""
