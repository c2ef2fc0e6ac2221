"""Searches the settings that do best on the validation images: by Optuna in worker processes, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import safetensors.torch
import torch
from optuna.study import Study
from optuna.trial import TrialState

from cmsf.evaluation.transfer.study import begin, connect, counts, fail_left_over, finished, opened, quiet_optuna, work
from cmsf.evaluation.transfer.trial import Problem, Settings
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_not_symlink

_LOOK_AGAIN = 0.5
_PATIENCE = 10.0
"""Seconds for all workers to record that their trials were given up."""


def work_in_parallel(
    problem: Problem,
    name: str,
    where: Path | str,
    trials: int,
    processes: int,
    seed: int,
    prune: bool,
    look: Callable[[], None],
) -> None:
    """Have `processes` workers go on with the study; `look` is called now and then meanwhile."""
    context = multiprocessing.get_context("spawn")
    with _handed_over(problem) as handed:
        workers: list[BaseProcess] = [
            context.Process(target=_worker, args=(*handed, name, where, trials, seed, prune), daemon=True)
            for _ in range(processes)
        ]
        try:
            for worker in workers:
                worker.start()
            running = list(workers)
            while running:
                wait([worker.sentinel for worker in running], _LOOK_AGAIN)
                look()
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    _check(worker)
                    running.remove(worker)
        finally:
            _stop(workers)


def _check(worker: BaseProcess) -> None:
    code = worker.exitcode
    if code is not None and code < 0:
        raise BadInput(
            f"a process of the search was killed ({signal.Signals(-code).name}); no finished trial is lost: search "
            "again to go on, with fewer processes if memory is short"
        )
    if code:
        raise RuntimeError("a process of the search failed; its error is above")


def _stop(workers: list[BaseProcess]) -> None:
    alive = [worker for worker in workers if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    deadline = time.monotonic() + _PATIENCE
    for worker in alive:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.join()


@contextmanager
def _handed_over(problem: Problem) -> Iterator[tuple[Path, int, bool]]:
    """Tensors in a file that all processes map into memory; shared memory is scarce in containers."""
    with tempfile.TemporaryDirectory(prefix="cmsf-search-") as folder:
        file = Path(folder) / "problem.safetensors"
        tensors = {
            "train": problem.train,
            "train_label": problem.train_label,
            "val": problem.val,
            "val_label": problem.val_label,
        }
        safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, file)
        yield file, problem.classes, problem.per_class


def _worker(
    file: Path, classes: int, per_class: bool, name: str, where: Path | str, trials: int, seed: int, prune: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; who started us stops us
    signal.signal(signal.SIGTERM, _interrupt)  # on which Optuna gives the trial up, and says so in the storage
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    problem = Problem(**safetensors.torch.load_file(file), classes=classes, per_class=per_class)
    try:
        with quiet_optuna():
            work(begin(connect(where), name, problem, seed, prune), problem, trials)
    except KeyboardInterrupt:
        sys.exit(0)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """If it is killed, nobody else would stop us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


__all__ = ["Problem", "SearchResult", "Settings", "Watch", "search"]

Watch = Callable[[int, float | None], None]
"""Told now and then how many trials are finished, and the best measure so far."""


@dataclass(frozen=True)
class SearchResult:
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
) -> SearchResult:
    """Maximise the validation measure over iterations 1 … 1000, learning rate 1e-6 … 1, weight decay 1e-9 … 1, by TPE.

    Goes on with what `storage` (a journal file, or a database's URL) has under this name until `trials` are finished,
    complete or pruned; several machines may share a database. In one process, the same seed gives the same search.
    """
    if trials < 1:
        raise BadInput(f"a search needs at least 1 trial, not {trials}")
    begun = time.monotonic()
    with quiet_optuna(), opened(storage) as kept:
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
    return SearchResult(
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


TRIALS = 200
"""The paper's."""
_LONGEST = 80

Search = Callable[[Problem, str, Watch], SearchResult]
"""The best settings of a problem; the name is that of the study, and stands for this problem alone."""


def make_search(folder: Path, *, trials: int, processes: int, seed: int, storage: str | None, ray: bool) -> Search:
    """storage: the URL of a database that several machines may share; else each study is a journal in the folder."""
    if ray and storage is not None:
        raise BadInput("--storage is Optuna's, and Ray keeps its own; leave out one of --storage and --ray")
    for place in (folder.parent, folder):  # results/transfer of a run that somebody else may have made
        check_not_symlink(place)
    if ray:
        from cmsf.evaluation.transfer.ray import search_with_ray

        # Ray has no word for anybody before it is done.
        return lambda problem, name, watch: search_with_ray(problem, _as_file(name), trials, folder, processes, seed)
    return lambda problem, name, watch: search(
        problem, name, trials, storage or folder / f"{_as_file(name)}.journal", processes, seed, watch=watch
    )


def _as_file(name: str) -> str:
    """A data set may be called ../../anything; its file stays in the folder. A hash at its end tells it apart."""
    return re.sub(r"[^\w.-]+", "-", name)[-_LONGEST:].lstrip(".-")
