"""Whole jobs that contestants do in turns, timed in seconds; the first turn of each is not timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Job:
    """The same work in one contestant's way."""

    name: str
    run: Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """Seconds in every round, and what the job returned in the turn before them."""

    name: str
    seconds: tuple[float, ...]
    outcome: Any

    @property
    def median(self) -> float:
        return median(self.seconds)

    def times_as_fast(self, other: Timed) -> float:
        return other.median / self.median

    def times_by_round(self, other: Timed) -> list[float]:
        return [theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True)]


def take_turns(jobs: Sequence[Job], rounds: int) -> dict[str, Timed]:
    """All jobs once a round, each round beginning with another, so that a noisy neighbour slows all of them."""
    outcome = {job.name: job.run() for job in jobs}
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    for number in range(rounds):
        first = number % len(jobs)
        for job in (*jobs[first:], *jobs[:first]):
            gc.collect()
            start = time.perf_counter()
            job.run()
            seconds[job.name].append(time.perf_counter() - start)
    return {job.name: Timed(job.name, tuple(seconds[job.name]), outcome[job.name]) for job in jobs}
