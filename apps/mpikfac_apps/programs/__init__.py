"""Code that small training programs share: options, a trainer, and a loop that runs a `Work`."""
