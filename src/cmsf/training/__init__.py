"""Training: the loop, its batches, schedule, validation, checkpoints and metrics."""
