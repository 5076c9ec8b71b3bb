"""The options of a run: names, reading, refused values, and the strategy made from options."""
