"""Store the metrics of a run: metrics.jsonl, and experiment trackers."""
