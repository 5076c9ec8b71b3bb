"""Take Gauss-Newton steps in the space of residuals, for equations and least squares."""
