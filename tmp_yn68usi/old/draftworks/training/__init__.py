"""Training: packs of samples, the step, the loop, checkpoints."""
