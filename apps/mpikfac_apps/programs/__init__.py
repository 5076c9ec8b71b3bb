"""What small training programs share: the options, the trainer, and the run of a `Work`."""
