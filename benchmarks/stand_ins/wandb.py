"""Stand in for the logging service `wandb`: everything is forgotten."""

from unittest.mock import MagicMock

init = Histogram = Image = MagicMock()
