"""Programs that plan and predict: plans, strategies, step times, and machine measurements."""
