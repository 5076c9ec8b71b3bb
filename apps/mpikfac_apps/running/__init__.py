"""What all training programs share: the loop over steps, checkpoints, run directory, and means."""
