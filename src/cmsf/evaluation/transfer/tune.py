"""Hyperparameter search by Optuna, in this process or several: it can be killed, continued and shared."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import optuna
import torch
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from cmsf.evaluation.transfer.trial import Problem, Settings, run_trial, rungs, sample_settings
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_not_symlink
from cmsf.utils.text import first_line

TRIALS = 200
"""The paper's."""
FIRST_RUNG, REDUCTION = 4, 2
"""Successive halving: after 4, 8, 16, … iterations a trial goes on if it is in the upper half of all that came so far.
Its cost is bounded whatever iterations are sampled: each rung is twice as long, and half as many reach it."""
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_SURPLUS = "surplus"
_LONGEST_FILE_NAME = 80
_POLL_SECONDS = 0.5
_TERMINATE_SECONDS = 10.0
"""For all workers to record that their trials were interrupted."""
_HEARTBEAT = 30
"""Seconds between a trial's heartbeats in a database; after four without one it has failed."""
_RECORD = b'{"op_code":'


@dataclass(frozen=True)
class TuningResult:
    """The best settings of those that were fitted to their end, their validation accuracy in per cent, and how many
    trials were complete, pruned and failed."""

    best: Settings
    value: float
    trials: dict[str, int]


OnProgress = Callable[[int, float | None], None]
"""Called now and then with the number of finished trials, and the best accuracy so far."""
Tuner = Callable[[Problem, str, OnProgress], TuningResult]
"""Searches the settings of a problem; the name is that of the study, and stands for this problem alone."""
StudyArguments = tuple[Path | str, str, int, int, bool]
"""Location, name, trials, seed, and whether to prune."""


def make_tuner(folder: Path, *, trials: int, processes: int, seed: int, storage: str | None, ray: bool) -> Tuner:
    """Returns the search by Optuna, or on Ray.

    storage: the URL of a database that several machines may share; else each study is a journal in the folder.
    """
    if ray and storage is not None:
        raise BadInput("--storage is Optuna's, and Ray keeps its own; leave out one of --storage and --ray")
    for place in (folder.parent, folder):  # results/transfer of a run that somebody else may have made
        check_not_symlink(place)
    if ray:
        from cmsf.evaluation.transfer.ray import tune_with_ray

        # Ray reports no progress before it is done.
        return lambda problem, name, _: tune_with_ray(problem, _file_name(name), trials, folder, processes, seed)
    return lambda problem, name, on_progress: tune(
        problem, name, trials, storage or folder / f"{_file_name(name)}.journal", processes, seed, True, on_progress
    )


def _file_name(study: str) -> str:
    """Returns a name for a file in the folder, whatever the data set is called; the hash at its end is unique."""
    return re.sub(r"[^\w.-]+", "-", study)[-_LONGEST_FILE_NAME:].lstrip(".-")


def tune(
    problem: Problem,
    name: str,
    trials: int,
    location: Path | str,
    processes: int,
    seed: int,
    prune: bool = True,
    on_progress: OnProgress = lambda finished, best: None,
) -> TuningResult:
    """Maximises validation accuracy over iterations 1 … 1000, learning rate 1e-6 … 1, weight decay 1e-9 … 1, by TPE.

    Continues what `location` (a journal file, or a database's URL) has under this name until `trials` are finished,
    complete or pruned; several machines may share a database. In one process, the same seed gives the same search.
    """
    if trials < 1:
        raise BadInput(f"a search needs at least 1 trial, not {trials}")
    with quiet_optuna(), _open_storage(location) as storage:
        study = _load_study(storage, name, problem, seed, prune)

        def report() -> None:
            complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            values = [trial.value for trial in complete if trial.value is not None]
            on_progress(_count(study, *_FINISHED), max(values, default=None))

        _fail_abandoned_trials(study, location)
        if _count(study, *_FINISHED) < trials:
            try:
                report()
                if processes <= 1:
                    _run_trials(study, problem, trials, report)
                else:
                    _run_in_processes(processes, problem, (location, name, trials, seed, prune), report)
            finally:
                _fail_abandoned_trials(study, location)
        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        counts = {word: _count(study, state) for word, state in states.items()}
        if not counts["complete"]:
            raise BadInput(f"none of {counts['pruned']} trials was fitted to its end; ask for more than {trials}")
        return TuningResult(Settings(**study.best_params), study.best_value, counts)


def _load_study(storage: BaseStorage, name: str, problem: Problem, seed: int, prune: bool) -> Study:
    """Returns the study of this name with the trials it has, or a new one."""
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        sampler=_PerTrialSeedSampler(seed),
        pruner=SuccessiveHalvingPruner(min_resource=FIRST_RUNG, reduction_factor=REDUCTION) if prune else NopPruner(),
    )
    # Without the features, whose last bits differ between machines.
    labels = zlib.crc32(problem.val_label.numpy().tobytes(), zlib.crc32(problem.train_label.numpy().tobytes()))
    images = f"{len(problem.train)} + {len(problem.val)} images, {problem.train.shape[1]} features"
    before, now = study.user_attrs.get("problem"), f"{images}, {problem.classes} classes, labels {labels:08x}"
    if before is None:
        study.set_user_attr("problem", now)
    elif before != now:
        raise BadInput(f"the search {name} was begun on other images ({before}, now {now}); choose another storage")
    return study


class _PerTrialSeedSampler(TPESampler):
    """TPE seeded anew for each trial by the search's seed and the trial's number: no two processes or machines sample
    the same, and a search that was stopped between two trials continues as if it had not been."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._search_seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        (seed,) = np.random.SeedSequence([self._search_seed, trial.number]).generate_state(1)
        # Running trials count as bad ones, lest all processes try the same spot.
        super().__init__(seed=int(seed), constant_liar=True)


def _count(study: Study, *states: TrialState) -> int:
    """Counts the trials in these states, without the surplus ones."""
    return sum(_SURPLUS not in trial.user_attrs for trial in study.get_trials(deepcopy=False, states=states))


def _run_trials(study: Study, problem: Problem, trials: int, after_trial: Callable[[], None] = lambda: None) -> None:
    """Runs trials until the study has enough, those of other processes and machines included."""
    while _needs_trial(study, trials):
        study.optimize(lambda trial: _objective(trial, problem, trials), n_trials=1, catch=(_SurplusTrial,))
        after_trial()


def _needs_trial(study: Study, trials: int) -> bool:
    """Returns whether to start another trial; while the last ones run elsewhere, waits for how they end."""
    while _count(study, *_FINISHED) < trials:
        if _count(study, *_FINISHED, TrialState.RUNNING) < trials:
            return True
        time.sleep(_POLL_SECONDS)
        fail_stale_trials(study)
    return False


class _SurplusTrial(Exception):
    """Two processes began the last trial at once, and this one is not needed."""


def _objective(trial: Trial, problem: Problem, trials: int) -> float:
    """Returns the validation accuracy of sampled settings; raises where the trial is pruned, or one too many."""
    begun = trial.study.get_trials(deepcopy=False, states=(*_FINISHED, TrialState.RUNNING))
    # The storage numbers trials one at a time, so the highest give way.
    if sum(other.number < trial.number for other in begun) >= trials:
        trial.set_user_attr(_SURPLUS, True)
        raise _SurplusTrial
    settings = sample_settings(trial)
    reached = 0

    def report(iteration: int, value: float) -> None:
        nonlocal reached
        reached = iteration
        trial.report(value, iteration)
        if trial.should_prune():
            raise optuna.TrialPruned

    value = run_trial(problem, settings, report)
    for rung in rungs(settings.iterations):
        if rung > reached:  # it converged earlier, and other trials are still compared with it there
            trial.report(value, rung)
    return value


def _run_in_processes(processes: int, problem: Problem, study: StudyArguments, report: Callable[[], None]) -> None:
    """Runs the study's trials in worker processes; `report` is called now and then meanwhile."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="cmsf-search-") as folder:
        file = Path(folder) / "problem.pt"  # which all processes map into memory; shared memory is scarce in containers
        torch.save(vars(problem), file)
        workers: list[BaseProcess] = [
            context.Process(target=_worker, args=(file, study), daemon=True) for _ in range(processes)
        ]
        try:
            for worker in workers:
                worker.start()
            running = list(workers)
            while running:
                wait([worker.sentinel for worker in running], _POLL_SECONDS)
                report()
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    _check_exit(worker.exitcode or 0)
                    running.remove(worker)
        finally:
            _stop(workers)


def _check_exit(code: int) -> None:
    if code < 0:
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


def _worker(file: Path, study: StudyArguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent stops this one
    signal.signal(signal.SIGTERM, _interrupt)  # on which Optuna records the trial as failed
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    problem = Problem(**torch.load(file, mmap=True, weights_only=True))
    location, name, trials, seed, prune = study
    try:
        with quiet_optuna():
            _run_trials(_load_study(_connect(location), name, problem, seed, prune), problem, trials)
    except KeyboardInterrupt:
        sys.exit(0)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _exit_with_parent() -> None:
    """Ends this process when its parent has ended: a killed parent stops nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what fails is raised as well
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _open_storage(location: Path | str) -> Iterator[BaseStorage]:
    """Connects to the storage; a journal is locked against other searches, and repaired if a process died writing."""
    if not isinstance(location, Path):
        yield _connect(location)
        return
    check_not_symlink(location)
    try:
        location.parent.mkdir(parents=True, exist_ok=True)
        file = location.open("a+b")
    except OSError as error:
        raise BadInput(f"{location}: cannot be written to ({error.strerror}); choose another place") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"{location}: another search is using it; wait for its end, or choose another file"
            ) from None
        _remove_stale_lock(location)
        try:
            storage = _connect(location)
            _cut_torn_record(file)
        except Exception as error:  # whatever a stranger's file makes Optuna stumble over
            raise BadInput(f"{location}: not a readable search journal; move it away to begin anew") from error
        yield storage


def _connect(location: Path | str) -> BaseStorage:
    if isinstance(location, Path):
        return JournalStorage(JournalFileBackend(str(location)))
    # Where two processes write at once, SQLite has one wait: longer than its five seconds, on a slow disk.
    wait = {"connect_args": {"timeout": 60}} if location.startswith("sqlite") else None
    try:
        return RDBStorage(location, engine_kwargs=wait, heartbeat_interval=_HEARTBEAT, grace_period=4 * _HEARTBEAT)
    except ArgumentError as error:
        raise BadInput("--storage takes a database's URL, such as sqlite:///search.db") from error
    except Exception as error:  # a missing driver, a host that does not answer, a schema of another version
        url = make_url(location).render_as_string(hide_password=True)
        raise BadInput(f"{url}: cannot be opened as the storage of a search ({first_line(error)})") from error


def _fail_abandoned_trials(study: Study, location: Path | str) -> None:
    """Marks running trials as failed, once no process is left to finish them; in a database the heartbeat does so."""
    if isinstance(location, Path):
        _remove_stale_lock(location)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)


def _remove_stale_lock(path: Path) -> None:
    """Removes Optuna's lock of a record: a killed process may have left it, and the next would wait 30 s for it."""
    Path(f"{path}.lock").unlink(missing_ok=True)


def _cut_torn_record(file: IO[bytes]) -> None:
    """Cuts the half line that a killed process may leave, to which Optuna would append the next record."""
    file.seek(0)
    content = file.read()
    torn = content[content.rfind(b"\n") + 1 :]
    if not torn:
        return
    if torn[: len(_RECORD)] != _RECORD[: len(torn)]:
        raise ValueError("not a record")
    file.truncate(len(content) - len(torn))
    os.fsync(file.fileno())
