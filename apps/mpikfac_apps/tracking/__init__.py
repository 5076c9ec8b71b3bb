"""Keep the numbers of a run: metrics.jsonl, and trackers of experiments."""
