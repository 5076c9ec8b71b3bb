"""The factors of a run as its curvature: influence functions and posteriors from a checkpoint."""
