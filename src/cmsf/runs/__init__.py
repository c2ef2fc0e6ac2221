"""Runs on the disk: the folder, checkpoints, the log, and what is computed from a finished run."""
