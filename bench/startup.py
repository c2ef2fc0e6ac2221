"""How long a user waits for the command line: its help, and the first training step.

    python bench/startup.py --out docs/results/bench/startup.json

`cmsf --help`, and `cmsf train cmsf-self` on the embedded data until its first line in metrics.jsonl, with a line for
every step. Torch, torchvision and timm are loaded in the second case only; loading torch alone is its limit.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import Target, measure_from_command_line

CMSF = [sys.executable, "-m", "cmsf"]


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_to_first_step() -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.perf_counter()
        command = [*CMSF, "train", "cmsf-self", "--out", str(out), "--log-every", "1", "--quiet"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            log = out / "metrics.jsonl"
            while not (log.exists() and log.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit("training ended before its first step")
                time.sleep(0.01)
            passed = time.perf_counter() - start
            process.kill()
    return passed


def measure(rounds: int) -> dict[str, Any]:
    jobs: dict[str, Callable[[], float]] = {
        "cmsf --help": lambda: seconds_of([*CMSF, "--help"]),
        "first training step": seconds_to_first_step,
        "python alone": lambda: seconds_of([sys.executable, "-c", "pass"]),
        "import torch alone": lambda: seconds_of([sys.executable, "-c", "import torch"]),
    }
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            passed = job()
            if turn:  # the first turn brings the files into memory
                spent[name].append(round(passed, 3))
    targets = [
        Target(name, statistics.median(spent[name]), goal, "s", at_most=True)
        for name, goal in (("cmsf --help", 0.4), ("first training step", 8.0))
    ]
    return {"seconds": spent, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
