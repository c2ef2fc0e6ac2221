"""`cmsf train` in a process of its own, which may be watched, held, stopped and killed."""

import json
import signal
import time
from pathlib import Path
from typing import Any

from forked import Started, cmsf_command

PATIENCE = 120


def start(out: Path, *flags: str | Path, limit: int | None = None, **settings: Any) -> Started:
    """A process that trains; limit: the largest file it may write."""
    flags += tuple(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
    flags += () if "--resume" in flags else ("--out", out)
    return cmsf_command("train", *flags, "--threads", "1", limit=limit)


def last_step(out: Path) -> int:
    """Of the last whole line of a run's log; 0 where there is none."""
    file = out / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return next((int(json.loads(line)["step"]) for line in reversed(lines) if line.endswith(b"\n")), 0)


def await_step(process: Started, out: Path, step: int) -> None:
    """Until the log has a line of this step or a later one."""
    deadline = time.monotonic() + PATIENCE
    while last_step(out) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def await_half_written(process: Started, out: Path) -> list[Path]:
    """Hold the process while a checkpoint is half there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        if list((out / "checkpoints").glob(".*.part")):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            parts = list((out / "checkpoints").glob(".*.part"))
            if parts:
                return parts
            process.send_signal(signal.SIGCONT)
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.0002)
