"""The training run: steps, checkpoints, run directory, and the way on after ranks are lost."""
