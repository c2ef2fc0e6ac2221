"""What training keeps of its speed beside other work, and what brief spinning costs on an idle machine.

    python bench/busy.py --out docs/results/bench/busy.json

`cmsf train cmsf-self` on 3,000 images of the embedded sample, with all cores, in the images a second of its second
epoch. Beside it run none, one, two or four processes that compute without end. The contestants are the command as it is
(threads that wait soon sleep); the same with --threads 1, which it recommends beside other work; and, alone and beside
two, threads that spin as long as OpenMP has it by default (GOMP_SPINCOUNT=300000). One that is not done after 100 s is
given up. The limit beside n processes is the fair share of c cores: c / (c + n) of the idle throughput.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from reporting import Target, measure_from_command_line

IMAGES, BUSY = 3000, (0, 1, 2, 4)
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "brief": ({}, []),
    "one thread": ({}, ["--threads", "1"]),
    "spinning": ({"GOMP_SPINCOUNT": "300000"}, []),
}
"""Environment and flags of each."""
SPINNING_BESIDE = (0, 2)
"""Beside how many processes spinning is measured: once is enough to see it, and it takes long."""
SLOWEST = 100.0
"""Seconds after which a run is given up, its speed being at most its images over this time."""


def images_per_second(data: Path, out: Path, way: str, busy: int) -> float:
    spin = [sys.executable, "-c", "while True: pass"]
    command = [sys.executable, "-m", "cmsf", "train", "cmsf-self-small", "--data", str(data), "--out", str(out)]
    environment, flags = WAYS[way]
    command += ["--epochs", "2", "--evaluate-every", "0", *flags]
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with ExitStack() as stack:
        for _ in range(busy):
            process = stack.enter_context(subprocess.Popen(spin))
            stack.callback(process.kill)
        try:
            subprocess.run(command, env=unset | environment, capture_output=True, check=True, timeout=SLOWEST)
        except subprocess.TimeoutExpired:
            return IMAGES * 2 / SLOWEST
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return float([line["images_per_second"] for line in lines if "images_per_second" in line][-1])


def measure(rounds: int) -> dict[str, Any]:
    speed: dict[str, dict[int, list[float]]] = {way: {busy: [] for busy in BUSY} for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        with as_file(files("cmsf.data") / "sample" / "fashion-mnist.npz") as path, np.load(path) as arrays:
            np.savez(data, x=arrays["x_train"][:IMAGES], y=arrays["y_train"][:IMAGES])
        for turn in range(rounds):
            for busy in BUSY:
                for way in WAYS if busy in SPINNING_BESIDE else ("brief", "one thread"):
                    speed[way][busy].append(images_per_second(data, Path(folder) / f"{turn}-{busy}-{way}", way, busy))
    median = {way: {busy: statistics.median(found) for busy, found in by.items() if found} for way, by in speed.items()}
    cores, idle = os.cpu_count() or 1, median["brief"][0]
    targets = [Target("idle, brief spinning", idle / median["spinning"][0], 0.97, "times the speed with long spinning")]
    for busy in BUSY[1:]:
        fair = idle * cores / (cores + busy)
        targets.append(Target(f"beside {busy} busy", median["brief"][busy] / fair, 0.7, "of the fair share"))
        alone = median["one thread"][busy] / fair
        targets.append(Target(f"beside {busy} busy, --threads 1", alone, 0.7, "of the fair share"))
    return {"images per second": speed, "median": median, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
