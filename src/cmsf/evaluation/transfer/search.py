"""Searches the settings with the best validation accuracy: by Optuna, in this process or several, or on Ray."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
from optuna.trial import TrialState
from safetensors.torch import load_file, save_file
from torch import Tensor

from cmsf.evaluation.transfer.study import (
    connect,
    count_finished,
    count_trials,
    fail_abandoned_trials,
    load_study,
    open_storage,
    quiet_optuna,
    run_trials,
)
from cmsf.evaluation.transfer.trial import Problem, Settings
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_not_symlink

TRIALS = 200
"""The paper's."""
_LONGEST_FILE_NAME = 80
_POLL_SECONDS = 0.5
_TERMINATE_SECONDS = 10.0
"""For all workers to record that their trials were interrupted."""


@dataclass(frozen=True)
class SearchResult:
    """The best settings of those that were fitted to their end, their validation accuracy in per cent, how many trials
    were complete, pruned and failed, and how long this call took."""

    best: Settings
    value: float
    trials: dict[str, int]
    seconds: float


OnProgress = Callable[[int, float | None], None]
"""Called now and then with the number of finished trials, and the best accuracy so far."""
Search = Callable[[Problem, str, OnProgress], SearchResult]
"""Searches the settings of a problem; the name is that of the study, and stands for this problem alone."""


def make_search(folder: Path, *, trials: int, processes: int, seed: int, storage: str | None, ray: bool) -> Search:
    """Returns the search by Optuna, or on Ray.

    storage: the URL of a database that several machines may share; else each study is a journal in the folder.
    """
    if ray and storage is not None:
        raise BadInput("--storage is Optuna's, and Ray keeps its own; leave out one of --storage and --ray")
    for place in (folder.parent, folder):  # results/transfer of a run that somebody else may have made
        check_not_symlink(place)
    if ray:
        from cmsf.evaluation.transfer.ray import search_with_ray

        # Ray reports no progress before it is done.
        return lambda problem, name, _: search_with_ray(problem, _file_name(name), trials, folder, processes, seed)
    return lambda problem, name, on_progress: search(
        problem, name, trials, storage or folder / f"{_file_name(name)}.journal", processes, seed, True, on_progress
    )


def _file_name(study: str) -> str:
    """A data set may be called ../../anything; its file stays in the folder. A hash at its end tells it apart."""
    return re.sub(r"[^\w.-]+", "-", study)[-_LONGEST_FILE_NAME:].lstrip(".-")


def search(
    problem: Problem,
    name: str,
    trials: int,
    storage: Path | str,
    processes: int,
    seed: int,
    prune: bool = True,
    on_progress: OnProgress | None = None,
) -> SearchResult:
    """Maximise validation accuracy over iterations 1 … 1000, learning rate 1e-6 … 1, weight decay 1e-9 … 1, by TPE.

    Continues what `storage` (a journal file, or a database's URL) has under this name until `trials` are finished,
    complete or pruned; several machines may share a database. In one process, the same seed gives the same search.
    """
    if trials < 1:
        raise BadInput(f"a search needs at least 1 trial, not {trials}")
    begun = time.monotonic()
    with quiet_optuna(), open_storage(storage) as opened:
        study = load_study(opened, name, problem, seed, prune)

        def report() -> None:
            if on_progress is not None:
                complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
                values = [trial.value for trial in complete if trial.value is not None]
                on_progress(count_finished(study), max(values, default=None))

        fail_abandoned_trials(study, storage)
        if count_finished(study) < trials:
            try:
                report()
                if processes <= 1:
                    run_trials(study, problem, trials, report)
                else:
                    _run_in_processes(processes, problem, (storage, name, trials, seed, prune), report)
            finally:
                fail_abandoned_trials(study, storage)
        counts = count_trials(study)
        if not counts["complete"]:
            raise BadInput(f"none of {count_finished(study)} trials was fitted to its end; ask for more than {trials}")
        best, value = study.best_trial, study.best_value
    return SearchResult(
        Settings(**best.params),
        value,
        {"complete": counts["complete"], "pruned": counts["pruned"], "failed": counts["fail"]},
        time.monotonic() - begun,
    )


StudyArguments = tuple[Path | str, str, int, int, bool]
"""Storage, name, trials, seed, and whether to prune."""


def _run_in_processes(processes: int, problem: Problem, study: StudyArguments, report: Callable[[], None]) -> None:
    """Have worker processes run the study's trials; `report` is called now and then meanwhile."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="cmsf-search-") as folder:
        # A file that all processes map into memory; shared memory is scarce in containers.
        file = Path(folder) / "problem.safetensors"
        save_file({key: value.contiguous() for key, value in vars(problem).items() if isinstance(value, Tensor)}, file)
        workers: list[BaseProcess] = [
            context.Process(target=_worker, args=(file, problem.classes, problem.per_class, study), daemon=True)
            for _ in range(processes)
        ]
        try:
            for worker in workers:
                worker.start()
            running = list(workers)
            while running:
                wait([worker.sentinel for worker in running], _POLL_SECONDS)
                report()
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    _check_exit(worker)
                    running.remove(worker)
        finally:
            _stop(workers)


def _check_exit(worker: BaseProcess) -> None:
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
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for worker in alive:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.join()


def _worker(file: Path, classes: int, per_class: bool, study: StudyArguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent stops this one
    signal.signal(signal.SIGTERM, _interrupt)  # on which Optuna records the trial as failed
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    problem = Problem(**load_file(file), classes=classes, per_class=per_class)
    storage, name, trials, seed, prune = study
    try:
        with quiet_optuna():
            run_trials(load_study(connect(storage), name, problem, seed, prune), problem, trials)
    except KeyboardInterrupt:
        sys.exit(0)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _exit_with_parent() -> None:
    """A killed parent stops nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
