"""The options of a run: their names, reading, checks, and the strategy built from them."""
