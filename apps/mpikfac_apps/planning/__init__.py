"""Programs that plan and predict: plans, strategies, step times, and a measured machine."""
