"""Runs that meet faults, go on, and are compared at their end with one that met none."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from forked import Started
from processes import await_half_written, await_step, last_step, start
from runs import assert_same_run, state

import cmsf

KILLS_IN_30_MINUTES = 20
KILLS_A_RUN = 4
SHORT = 10
"""Below so many minutes, runs are small."""
SETTINGS = {"batch_size": 50, "log_every": 2, "evaluate_every": 6}
OFTEN = ("--checkpoint-minutes", "0.02")
METHODS: dict[str, dict[str, Any]] = {
    "cmsf-self-small": {},
    "cmsf-semi-small": {"labels_per_class": 10},
    "cmsf-sup-small": {},
}
ROOM = 64_000_000
SMALL_FILES = 200_000
FOR_EVER = 3600.0


@dataclass
class Report:
    cells: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stops: list[float] = field(default_factory=list)
    """Seconds from SIGTERM to the end of the process."""

    @property
    def wrong(self) -> list[str]:
        return [f"{cell['cell']}: {what}" for cell in self.cells for what in cell["wrong"]]


class Soak:
    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self.folder, self.chance, self.report = folder, random.Random(seed), Report()
        self.kills = max(2, round(KILLS_IN_30_MINUTES * minutes / 30))
        self.deadline = time.monotonic() + 60 * minutes
        images, self.epochs = (1_000, 12) if minutes >= SHORT else (330, 4)
        self.images = folder / "images.npz"
        with as_file(files("cmsf.data") / "sample" / "fashion-mnist.npz") as path, np.load(path) as sample:
            np.savez(self.images, x=sample["x_train"][:images], y=sample["y_train"][:images])
        self.whole: dict[str, cmsf.Run] = {}

    def train(self, out: Path, method: str, limit: int | None = None) -> Started:
        """A process that begins a run, or goes on with it."""
        if (out / "recipe.yaml").exists():
            return start(out, "--resume", out, *OFTEN, limit=limit)
        settings = SETTINGS | METHODS[method] | {"epochs": self.epochs}
        return start(out, method, "--data", self.images, *OFTEN, limit=limit, **settings)

    def go(self) -> None:
        """Every kind of fault once at least, kills until they are enough, and all of it again while there is time."""
        number = 0
        while number < 3 or self.report.counts["kill"] < self.kills or time.monotonic() < self.deadline:
            method = list(METHODS)[number // 3 % len(METHODS)]
            late = number >= 3 and time.monotonic() > self.deadline
            self.cell(number, method, "kill" if late else ("kill", "term", "disk")[number % 3])
            number += 1

    def cell(self, number: int, method: str, kind: str) -> None:
        begun, wrong = time.monotonic(), []
        if method not in self.whole:
            code, said = ended(self.train(self.folder / method, method))
            assert code == 0, said
            self.whole[method] = cmsf.Run(self.folder / method)
        total = last_step(self.whole[method].path)
        fault: dict[str, Callable[[Path, str, int], list[str]]] = {
            "kill": self.kill,
            "term": self.stop,
            "disk": self.fill,
        }
        with self.small_disk() if kind == "disk" else self.plain_folder() as place:
            out = place / f"cell-{number}"
            wrong += fault[kind](out, method, total)
            code, said = ended(self.train(out, method))
            wrong += [f"exit code {code}: {said[-300:]}"] if code else differences(self.whole[method], cmsf.Run(out))
        seconds = round(time.monotonic() - begun)
        about = {"cell": number, "method": method, "fault": kind, "seconds": seconds, "wrong": wrong}
        self.report.cells.append(about)
        print(f"cell {number}: {method}, {kind}: {wrong or 'as if nothing had happened'}", flush=True)

    def kill(self, out: Path, method: str, total: int) -> list[str]:
        for kill in range(min(KILLS_A_RUN, max(1, self.kills - self.report.counts["kill"]))):
            process = self.train(out, method)
            ahead = last_step(out) + self.chance.randrange(1, max(2, total // (KILLS_A_RUN + 1)))
            saving = kill % 3 == 1
            with suppress(AssertionError):  # it was at its end before
                await_step(process, out, ahead)
                if saving:
                    await_half_written(process, out)
                else:
                    time.sleep(self.chance.random() / 3)
            process.kill()
            if process.wait() == -signal.SIGKILL:
                self.report.counts["kill"] += 1
                self.report.counts["kill while saving"] += saving
        return []

    def stop(self, out: Path, method: str, total: int) -> list[str]:
        wrong = []
        for part in (1, 2):
            process = self.train(out, method)
            await_step(process, out, total * part // 3 + self.chance.randrange(max(1, total // 10)))
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code, said = ended(process)
            self.report.stops.append(round(time.monotonic() - asked, 2))
            self.report.counts["SIGTERM"] += 1
            if code != 128 + signal.SIGTERM:
                wrong.append(f"exit code {code} after SIGTERM: {said[-300:]}")
        return wrong

    def fill(self, out: Path, method: str, total: int) -> list[str]:
        """Full in mid-run: it stops, with the checkpoint before it whole; and goes on when there is room."""
        process, ballast = self.train(out, method), out.parent / "ballast"
        await_step(process, out, total // 3)
        if os.path.ismount(out.parent):
            fill_up(ballast)
            code, said = ended(process)
        else:
            process.send_signal(signal.SIGTERM)
            process.wait()
            code, said = ended(self.train(out, method, limit=SMALL_FILES))
        self.report.counts["full disk"] += 1
        wrong = []
        if code != 2 or ("No space left" not in said and "File too large" not in said) or "Traceback" in said:
            wrong.append(f"exit code {code} on a full disk: {said[-300:]}")
        if list(out.rglob("*.part")):
            wrong.append("there are half-written files after a full disk")
        ballast.unlink(missing_ok=True)
        state(cmsf.Run(out))  # raises if the checkpoint before is not whole
        return wrong

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


def ended(process: Started) -> tuple[int, str]:
    said = process.communicate(FOR_EVER)[1]
    return process.wait(), said


def differences(whole: cmsf.Run, other: cmsf.Run) -> list[str]:
    try:
        assert_same_run(whole, other)
    except AssertionError as error:
        return [f"it differs: {str(error)[:300]}"]
    return ["there are half-written files"] if list(other.path.rglob("*.part")) else []


def fill_up(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(16_384))
