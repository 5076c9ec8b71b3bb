"""Hand the numbers of a run to trackers of experiments."""
