"""Programs for research: predictions, studies of many runs, and uses of the curvature."""
