"""The transfer protocol's search for the settings that do best on the validation images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.study import Study
from optuna.trial import TrialState

from cmsf.errors import BadInput
from cmsf.evaluation.transfer.lbfgs import Settings
from cmsf.evaluation.transfer.quiet import quietly
from cmsf.evaluation.transfer.storage import fail_left_over, opened
from cmsf.evaluation.transfer.study import begin, counts, finished, work
from cmsf.evaluation.transfer.trial import Problem
from cmsf.evaluation.transfer.workers import work_in_parallel

__all__ = ["Found", "Problem", "Settings", "Watch", "search"]

Watch = Callable[[int, float | None], None]
"""Told now and then how many trials are finished, and the best measure so far."""


@dataclass(frozen=True)
class Found:
    """The best settings of those that were fitted to their end, their validation measure in per cent, how many trials
    were complete, pruned and failed, and how long this call took."""

    best: Settings
    value: float
    trials: dict[str, int]
    seconds: float


def search(
    problem: Problem,
    name: str,
    trials: int,
    storage: Path | str,
    processes: int,
    seed: int,
    prune: bool = True,
    watch: Watch | None = None,
) -> Found:
    """Maximise the validation measure over iterations 1 … 1000, learning rate 1e-6 … 1, weight decay 1e-9 … 1, by TPE.

    Goes on with what `storage` (a journal file, or a database's URL) has under this name until `trials` are finished,
    complete or pruned; several machines may share a database. In one process, the same seed gives the same search.
    """
    if trials < 1:
        raise BadInput(f"a search needs at least 1 trial, not {trials}")
    begun = time.monotonic()
    with quietly(), opened(storage) as kept:
        study = begin(kept, name, problem, seed, prune)
        fail_left_over(study, storage)
        if finished(study) < trials:
            try:
                look = _looking(study, watch)
                look()
                if processes <= 1:
                    work(study, problem, trials, look)
                else:
                    work_in_parallel(problem, name, storage, trials, processes, seed, prune, look)
            finally:
                fail_left_over(study, storage)
        number = counts(study)
        if not number["complete"]:
            raise BadInput(f"none of {finished(study)} trials was fitted to its end; ask for more than {trials}")
        best, value = study.best_trial, study.best_value
    return Found(
        Settings(**best.params),
        value,
        {"complete": number["complete"], "pruned": number["pruned"], "failed": number["fail"]},
        time.monotonic() - begun,
    )


def _looking(study: Study, watch: Watch | None) -> Callable[[], None]:
    """Looks at the study for whoever watches."""

    def look() -> None:
        if watch is not None:
            values = [trial.value for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))]
            watch(finished(study), max((value for value in values if value is not None), default=None))

    return look
