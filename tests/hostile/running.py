"""Many cases, each under a hard limit of time and memory, in processes that may be lost."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch

from hostile.judging import Box, judge, watch_this_process
from hostile.kinds import KINDS
from hostile.stock import Stock

SECONDS, PATIENCE = 30.0, 150.0
"""Of the processor, and of the clock, for one case, most of which take a few hundredths."""
MEMORY = 3 << 30
"""Bytes that a case may take beyond what the process has when it begins; more of it is refused by the system."""
RESIDENT = 2000 << 20
"""Bytes of that which it may really use."""


@dataclass(frozen=True)
class Outcome:
    kind: str
    number: int
    exit_code: int | None
    complaints: list[str]
    seconds: float
    megabytes: int
    output: str = ""


def planned(cases: int, kinds: Sequence[str] = tuple(KINDS)) -> list[tuple[str, int]]:
    """Kinds in turn, so that any number of cases has all of them."""
    return [(kinds[number % len(kinds)], number // len(kinds)) for number in range(cases)]


def run_cases(
    stock: Stock, plan: Sequence[tuple[str, int]], seed: int, place: Path, processes: int = 1
) -> Iterator[Outcome]:
    shares = [list(plan[first::processes]) for first in range(processes)]
    workers = [_Worker(stock, share, seed, place / f"worker{number}") for number, share in enumerate(shares) if share]
    while workers:
        for worker in list(workers):
            outcome = worker.next(0.05 / len(workers))
            if outcome is not None:
                yield outcome
            if worker.done:
                workers.remove(worker)


class _Worker:
    """A process that works through its cases; when one of them costs it its life, another goes on."""

    def __init__(self, stock: Stock, plan: list[tuple[str, int]], seed: int, place: Path) -> None:
        self.stock, self.plan, self.seed, self.place = stock, plan, seed, place
        self.at = 0
        self._start()

    @property
    def done(self) -> bool:
        if self.at < len(self.plan):
            return False
        self.process.join()
        return True

    def next(self, patience: float) -> Outcome | None:
        if self.at >= len(self.plan):
            return None
        if self.pipe.poll(patience):
            try:
                kind, outcome = self.pipe.recv()
            except EOFError:
                return self._lost("the process ended")
            self.began, self.used = time.monotonic(), _processor_time(self.process.pid)
            if kind == "begin":
                return None
            self.at += 1
            return outcome  # type: ignore[no-any-return]
        used, waited = _processor_time(self.process.pid) - self.used, time.monotonic() - self.began
        if used > SECONDS or waited > PATIENCE:
            return self._lost(f"not done after {used:.0f} s of the processor and {waited:.0f} s of the clock")
        return None

    def _lost(self, why: str) -> Outcome:
        waited = time.monotonic() - self.began
        self.process.kill()
        self.process.join()
        ended = f"{why} (exit code {self.process.exitcode})"
        kind, number = self.plan[self.at]
        self.at += 1
        self._start()
        return Outcome(kind, number, None, [ended], waited, 0)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.began = time.monotonic()
        arguments = (theirs, self.stock, self.plan[self.at :], self.seed, self.place)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        self.used = 0.0
        theirs.close()


def _work(pipe: Connection, stock: Stock, plan: list[tuple[str, int]], seed: int, place: Path) -> None:
    torch.set_num_threads(1)
    watch_this_process()
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for kind, number in plan:
        pipe.send(("begin", None))
        pipe.send(("end", run_case(stock, kind, number, seed, place)))


def run_case(stock: Stock, kind: str, number: int, seed: int, place: Path) -> Outcome:
    shutil.rmtree(place, ignore_errors=True)
    box = Box(place / "box")
    for folder in (box.given, box.out, box.path / "cache"):
        folder.mkdir(parents=True)
    (box.path / "precious.txt").write_text("nobody may touch this")
    for variable in ("HOME", "CMSF_CACHE", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME"):
        os.environ[variable] = str(box.path / "cache")
    case = KINDS[kind](stock, box, Random(f"{seed} {kind} {number}"))
    os.chdir(box.out)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begun = time.monotonic()
    with _bounded():
        verdict = judge(box, case)
    seconds, taken = time.monotonic() - begun, max(0, _resident("VmHWM") - before)
    complaints = verdict.complaints + ([f"took {taken >> 20} MB"] if taken > RESIDENT else [])
    os.chdir("/")
    shutil.rmtree(place, ignore_errors=True)
    return Outcome(kind, number, verdict.exit_code, complaints, seconds, taken >> 20, verdict.output)


class _bounded:
    """No more memory than so much, whoever asks for it."""

    def __enter__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_AS)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, self.limits[1]))

    def __exit__(self, *error: Any) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.limits)


def _processor_time(process: int | None) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it is gone, which the pipe will say
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
