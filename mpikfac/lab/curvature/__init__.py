"""Use a run's factors as its curvature: influence functions and posteriors from a checkpoint."""
