"""Print plans, and strategies by name."""
