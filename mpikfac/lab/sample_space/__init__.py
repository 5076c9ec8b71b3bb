"""Gauss-Newton steps in the space of residuals, for equations and their derivatives."""
