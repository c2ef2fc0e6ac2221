"""Train for a while under faults, and show that nothing is lost and nothing different.

    python scripts/soak.py --minutes 30 --out docs/results/soak.json

Runs on a cut of the embedded sample are killed at random moments (some of them while a checkpoint is half written),
stopped by SIGTERM, and run into a full disk; then they go on to their end, and weights, bank, cache and metrics must
equal those of a run that nothing happened to, bit for bit. Beside them one process trains all the time, and its memory
and open files are watched. A full disk is a small tmpfs where this process may mount one, else a limit to the size of
files. Exit code 1 if anything was lost, differed or grew. The report goes to `--out` and, as a page, beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cmsf import checkpoint
from cmsf.checkpoint import Checkpoint
from cmsf.environment import describe_machine
from cmsf.metrics import TIMING_FIELDS
from cmsf.run import Run

KILLS_IN_30_MINUTES = 20
SHORT = 10
"""Below so many minutes, runs are small."""
SETTINGS = ["--batch-size", "50", "--log-every", "2", "--evaluate-every", "6", "--threads", "1"]
OFTEN = ["--checkpoint-minutes", "0.02"]
METHODS = {"cmsf-self-small": [], "cmsf-semi-small": ["--labels-per-class", "10"], "cmsf-sup-small": []}
KILLS_A_CELL = 4
PATIENCE = 3600
FLAT = 0.02
ROOM = 64_000_000


@dataclass
class Report:
    cells: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stops: list[float] = field(default_factory=list)
    """Seconds from SIGTERM to the end of the process."""

    @property
    def wrong(self) -> list[str]:
        return [f"{cell['cell']}: {what}" for cell in self.cells for what in cell["wrong"]]


@dataclass
class Process:
    """`cmsf train` in a process of its own."""

    out: Path
    arguments: list[str]
    limit: int | None = None

    def __enter__(self) -> Process:
        resumed = (self.out / "recipe.yaml").exists()
        what = ["--resume", str(self.out), *OFTEN] if resumed else [*self.arguments, "--out", str(self.out), *OFTEN]
        limit = self.limit
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cmsf", "train", *what, *(["--threads", "1"] if resumed else [])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def until(self, step: int) -> bool:
        """Wait for a step in the log; whether it came before the end."""
        start = time.monotonic()
        while self.process.poll() is None and last_step(self.out) < step:
            if time.monotonic() - start > PATIENCE:
                raise TimeoutError(f"step {step} of {self.out} did not come")
            time.sleep(0.01)
        return self.process.poll() is None

    def half_written(self) -> bool:
        """Wait for a checkpoint that is being written, and hold the process there."""
        while self.process.poll() is None:
            if list((self.out / "checkpoints").glob(".*.part")):
                self.process.send_signal(signal.SIGSTOP)
                time.sleep(0.05)
                if list((self.out / "checkpoints").glob(".*.part")):
                    return True
                self.process.send_signal(signal.SIGCONT)
            time.sleep(0.0002)
        return False

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, said


def last_step(out: Path) -> int:
    try:
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return next(json.loads(line)["step"] for line in reversed(lines) if line.endswith(b"\n"))
    except (OSError, StopIteration):
        return 0


def differences(whole: Run, other: Run) -> list[str]:
    """What of two runs is not the same to the last bit."""
    found = []
    logs = [
        [
            {name: value for name, value in json.loads(line).items() if name not in TIMING_FIELDS}
            for line in run.folder.metrics_file.read_text().splitlines()
        ]
        for run in (whole, other)
    ]
    if logs[0] != logs[1]:
        found.append(f"metrics.jsonl differs ({len(logs[0])} lines and {len(logs[1])})")
    if not same(load_file(whole.folder.backbone_file), load_file(other.folder.backbone_file)):
        found.append("backbone.safetensors differs")
    states = [contents(run) for run in (whole, other)]
    for state in states:
        state["state"]["progress"].pop("metrics_length")
    found += [
        f"the {name} of the last checkpoint differs" for name in states[0] if not same(*(s[name] for s in states))
    ]
    if list(other.path.rglob("*.part")):
        found.append("there are half-written files")
    return found


def contents(run: Run) -> dict[str, Any]:
    newest = checkpoint.newest(run.folder.checkpoints)
    assert newest is not None
    return Checkpoint.read(newest).contents()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first.nan_to_num(7e7), second.nan_to_num(7e7))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


class Soak:
    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self.folder, self.chance, self.report = folder, random.Random(seed), Report()
        self.kills = max(2, round(KILLS_IN_30_MINUTES * minutes / 30))
        self.deadline = time.monotonic() + 60 * minutes
        images, self.epochs = (1_000, 12) if minutes >= SHORT else (330, 4)
        with as_file(files("cmsf.data") / "sample" / "fashion-mnist.npz") as path, np.load(path) as sample:
            np.savez(folder / "images.npz", x=sample["x_train"][:images], y=sample["y_train"][:images])
        self.whole: dict[str, Run] = {}

    def arguments(self, method: str) -> list[str]:
        data = ["--data", str(self.folder / "images.npz"), "--epochs", str(self.epochs)]
        return [method, *data, *SETTINGS, *METHODS[method]]

    def go(self) -> None:
        """Every kind of fault once at least, kills until they are enough, and all of it again while there is time."""
        number = 0
        while number < 3 or self.report.counts["kill"] < self.kills or time.monotonic() < self.deadline:
            method = list(METHODS)[number // 3 % len(METHODS)]
            kind = ("kill", "term", "disk")[number % 3]
            if self.report.counts["kill"] < self.kills and number >= 3 and time.monotonic() > self.deadline:
                kind = "kill"
            self.cell(number, method, kind)
            number += 1

    def cell(self, number: int, method: str, kind: str) -> None:
        begun, wrong = time.monotonic(), []
        if method not in self.whole:
            with Process(self.folder / method, self.arguments(method)) as process:
                code, said = process.end()
                assert code == 0, said
            self.whole[method] = Run(self.folder / method)
        total = last_step(self.whole[method].path)
        with self.small_disk() if kind == "disk" else self.plain_folder() as place:
            out = place / f"cell-{number}"
            {"kill": self.kill, "term": self.stop, "disk": self.fill}[kind](out, method, total, wrong)
            with Process(out, self.arguments(method)) as process:
                code, said = process.end()
            wrong += [f"exit code {code}: {said[-300:]}"] if code else differences(self.whole[method], Run(out))
        self.report.cells.append(
            {
                "cell": number,
                "method": method,
                "fault": kind,
                "seconds": round(time.monotonic() - begun),
                "wrong": wrong,
            }
        )
        print(f"cell {number}: {method}, {kind}: {wrong or 'as if nothing had happened'}", flush=True)

    def kill(self, out: Path, method: str, total: int, wrong: list[str]) -> None:
        for kill in range(min(KILLS_A_CELL, max(1, self.kills - self.report.counts["kill"]))):
            with Process(out, self.arguments(method)) as process:
                ahead = last_step(out) + self.chance.randrange(1, max(2, total // (KILLS_A_CELL + 1)))
                alive = process.until(min(ahead, total - 3))
                saving = alive and kill % 3 == 1 and process.half_written()
                if not saving:
                    time.sleep(self.chance.random() / 3)
                if process.process.poll() is None:
                    process.process.kill()
                    self.report.counts["kill"] += 1
                    self.report.counts["kill while saving"] += saving

    def stop(self, out: Path, method: str, total: int, wrong: list[str]) -> None:
        for part in (1, 2):
            with Process(out, self.arguments(method)) as process:
                process.until(total * part // 3 + self.chance.randrange(max(1, total // 10)))
                asked = time.monotonic()
                process.process.send_signal(signal.SIGTERM)
                code, said = process.end()
                self.report.stops.append(round(time.monotonic() - asked, 2))
                self.report.counts["SIGTERM"] += 1
                if code != 143:
                    wrong.append(f"exit code {code} after SIGTERM: {said[-300:]}")

    def fill(self, out: Path, method: str, total: int, wrong: list[str]) -> None:
        """Full in mid-run: it stops, with the checkpoint before it whole; and goes on when there is room."""
        mounted = os.path.ismount(out.parent)
        with Process(out, self.arguments(method)) as process:
            process.until(total // 3)
            if mounted:
                fill_up(out.parent / "ballast")
            else:
                process.process.send_signal(signal.SIGTERM)
            code, said = process.end()
        if not mounted:
            with Process(out, self.arguments(method), limit=200_000) as process:
                code, said = process.end()
        self.report.counts["full disk"] += 1
        if code != 2 or ("No space left" not in said and "File too large" not in said) or "Traceback" in said:
            wrong.append(f"exit code {code} on a full disk: {said[-300:]}")
        if list(out.rglob("*.part")):
            wrong.append("there are half-written files after a full disk")
        with suppress(FileNotFoundError):
            (out.parent / "ballast").unlink()
        contents(Run(out))  # raises if the checkpoint before is not whole

    @contextmanager
    def plain_folder(self) -> Iterator[Path]:
        yield self.folder

    @contextmanager
    def small_disk(self) -> Iterator[Path]:
        place = self.folder / "small"
        place.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(place)]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self.report.counts["full tmpfs" if mounted else "full by a limit to the size of files"] += 1
        try:
            yield place
        finally:
            if mounted:
                subprocess.run(["umount", str(place)], check=True)


def fill_up(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(16_384))


class Watch(threading.Thread):
    """Memory and open files of a process that trains as long as the soak does."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        super().__init__(daemon=True)
        command = [
            sys.executable,
            "-m",
            "cmsf",
            "train",
            *arguments,
            "--epochs",
            "100000",
            "--out",
            str(folder / "long"),
        ]
        self.process = subprocess.Popen([*command, *OFTEN], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.over = threading.Event()
        self.memory: list[int] = []
        self.files: list[int] = []

    def run(self) -> None:
        page, place = os.sysconf("SC_PAGE_SIZE"), Path(f"/proc/{self.process.pid}")
        while not self.over.wait(0.5):
            self.memory.append(int((place / "statm").read_text().split()[1]) * page)
            self.files.append(len(list((place / "fd").iterdir())))

    def end(self) -> dict[str, Any]:
        self.over.set()
        self.join()
        alive = self.process.poll() is None
        self.process.terminate()
        self.process.wait(PATIENCE)
        warm = len(self.memory) // 4
        later = self.memory[warm:]
        size = max(1, len(later) // 10)
        levels = [median(later[start : start + size]) for start in range(0, size * 10, size)]
        growth = (max(levels) - levels[0]) / levels[0]
        return {
            "samples": len(self.memory),
            "MB by tenths, after a quarter of the time": [round(level / 1e6, 1) for level in levels],
            "growth": round(growth, 4),
            "open files": {"first": self.files[warm], "last": self.files[-1], "most": max(self.files[warm:])},
            "alive to the end": alive,
            "flat": alive and growth <= FLAT and self.files[-1] <= max(self.files[warm : warm + 20]) + 2,
        }


def page(report: dict[str, Any]) -> str:
    counts = report["faults"]
    columns = ("cell", "method", "fault", "seconds")
    rows = [
        f"| {' | '.join(str(cell[name]) for name in columns)} | {'; '.join(cell['wrong']) or 'same'} |"
        for cell in report["cells"]
    ]
    long = report["long-lived process"]
    return "\n".join(
        [
            "# Under faults",
            "",
            f"`make soak` for {report['minutes']:g} minutes on {report['machine']['machine']}: "
            + ", ".join(f"{count} × {name}" for name, count in counts.items())
            + f". {report['verdict']}",
            "",
            "Each cell is a run that met its faults, went on, and was compared at its end, bit for bit, with a run",
            "that nothing happened to: weights, optimiser, bank, cache, progress, metrics but for times.",
            "",
            "| cell | recipe | fault | seconds | compared |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"SIGTERM to exit: {max(report['seconds from SIGTERM to exit'], default=0)} s at most. A process that",
            f"trained all the time grew by {100 * long['growth']:.2f} % after its first quarter (allowed: 2 %),",
            f"with {long['open files']['first']} open files then and {long['open files']['last']} at the end.",
            "",
        ]
    )


def main() -> int:
    chosen = _arguments()
    begun, load = datetime.now(UTC), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        soak = Soak(folder, chosen.minutes, chosen.seed)
        watch = Watch(folder, soak.arguments("cmsf-self-small"))
        watch.start()
        try:
            soak.go()
        finally:
            long = watch.end()
    found = soak.report
    wrong = found.wrong + ([] if long["flat"] else [f"the long-lived process is not flat: {long}"])
    report = {
        "verdict": "Nothing was lost, and nothing was different." if not wrong else f"WRONG: {wrong}",
        "minutes": chosen.minutes,
        "seed": chosen.seed,
        "faults": dict(found.counts),
        "seconds from SIGTERM to exit": found.stops,
        "cells": found.cells,
        "long-lived process": long,
        "machine": describe_machine("cpu"),
        "load before": round(load, 2),
        "begun": begun.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - begun).total_seconds()),
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    chosen.out.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long; what has begun is finished")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/soak.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
