"""The plan of a single rank: layouts and messages."""
