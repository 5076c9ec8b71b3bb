"""The training run: steps, checkpoints, run directory, and recovery after ranks are lost."""
