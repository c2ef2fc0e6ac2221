"""Train for a while under faults, and show that nothing is lost and nothing different.

    make soak MINUTES=30

Runs on a cut of the embedded sample are killed at random moments (some of them while a checkpoint is half written),
stopped by SIGTERM, and run into a full disk; then they go on to their end, and weights, bank, cache and metrics must
equal those of a run that nothing happened to, bit for bit. Beside them one process trains all the time, and its memory
and open files are watched. A full disk is a small tmpfs where this process may mount one, else a limit to the size of
files.
"""
