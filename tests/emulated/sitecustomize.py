"""Load the emulated device before torch, in every process that finds this folder in PYTHONPATH."""

import emulated  # noqa: F401
