"""Use a run's factors as the curvature of its loss: influence functions and posteriors."""
