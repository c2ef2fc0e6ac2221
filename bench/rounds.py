"""Rounds in which the contestants take turns, so that a noisy neighbour slows all of them and not one."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median

import torch
from setting import WORKERS, Batches, Contestant

WARM_UP = 3 * WORKERS
"""Batches that are not timed: worker processes start, fill their queues and come into step."""


@dataclass(frozen=True)
class Result:
    """Images a second in every round."""

    name: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def times(self, other: Result) -> float:
        """How many times as fast as another, by the medians."""
        return self.median / other.median

    def times_by_round(self, other: Result) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True)]


def take_turns(
    contestants: Sequence[Contestant], rounds: int, seconds: float, threads: int, warm_up: int = WARM_UP
) -> list[Result]:
    """All contestants once a round, each round beginning with another of them."""
    speeds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            torch.set_num_threads(contestant.threads or threads)
            speeds[contestant.name].append(images_per_second(contestant.start(), seconds, warm_up))
    return [Result(name, tuple(speed)) for name, speed in speeds.items()]


def images_per_second(batches: Batches, seconds: float, warm_up: int) -> float:
    """Over whole turns of all workers, whose batches come at almost the same time."""
    gc.collect()
    with closing(batches):
        for _ in range(warm_up):
            next(batches)
        start, done, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            done += sum(next(batches) for _ in range(WORKERS))
            elapsed = time.perf_counter() - start
    return done / elapsed
