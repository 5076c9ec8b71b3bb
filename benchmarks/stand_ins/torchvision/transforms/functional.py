"""Stand in for a module that a script imports and does not use."""
