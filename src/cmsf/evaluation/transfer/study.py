"""The search as an Optuna study: its storage, sampler and pruner, and the trials it still needs."""

from __future__ import annotations

import fcntl
import os
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from cmsf.evaluation.transfer.trial import Problem, run_trial, rungs, sample_settings
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_not_symlink
from cmsf.utils.text import first_line

FIRST_RUNG, REDUCTION = 4, 2
"""Successive halving: after 4, 8, 16, … iterations a trial goes on if it is in the upper half of all that came so far.
Its cost is bounded whatever iterations are sampled: each rung is twice as long, and half as many reach it.
"""
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_SURPLUS = "surplus"
_POLL_SECONDS = 0.5
_HEARTBEAT = 30
"""Seconds between a trial's heartbeats in a database; after four without one it has failed."""
_RECORD = b'{"op_code":'


@contextmanager
def quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    # What fails is raised as well.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def load_study(storage: BaseStorage, name: str, problem: Problem, seed: int, prune: bool) -> Study:
    """Returns the study of this name with the trials it has, or a new one."""
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        sampler=PerTrialSeedSampler(seed),
        pruner=SuccessiveHalvingPruner(min_resource=FIRST_RUNG, reduction_factor=REDUCTION) if prune else NopPruner(),
    )
    before, now = study.user_attrs.get("problem"), _summary(problem)
    if before is None:
        study.set_user_attr("problem", now)
    elif before != now:
        raise BadInput(f"the search {name} was begun on other images ({before}, now {now}); choose another storage")
    return study


class PerTrialSeedSampler(TPESampler):
    """TPE seeded anew for each trial by the search's seed and the trial's number: no two processes or machines sample
    the same, and a search that was stopped between two trials continues as if it had not been."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self._search_seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        (seed,) = np.random.SeedSequence([self._search_seed, trial.number]).generate_state(1)
        # Running trials count as bad ones, lest all processes try the same spot.
        super().__init__(seed=int(seed), constant_liar=True)


def _summary(problem: Problem) -> str:
    """Tells data sets apart; without the features, whose last bits differ between machines."""
    labels = zlib.crc32(problem.val_label.numpy().tobytes(), zlib.crc32(problem.train_label.numpy().tobytes()))
    images = f"{len(problem.train)} + {len(problem.val)} images, {problem.train.shape[1]} features"
    return f"{images}, {problem.classes} classes, labels {labels:08x}"


def count_trials(study: Study) -> Counter[str]:
    """Counts trials by state, without the surplus ones."""
    trials = study.get_trials(deepcopy=False)
    return Counter(trial.state.name.lower() for trial in trials if _SURPLUS not in trial.user_attrs)


def count_finished(study: Study) -> int:
    counts = count_trials(study)
    return sum(counts[state.name.lower()] for state in _FINISHED)


def run_trials(study: Study, problem: Problem, trials: int, after_trial: Callable[[], None] = lambda: None) -> None:
    """Runs trials until the study has enough, those of other processes and machines included."""

    def objective(trial: Trial) -> float:
        _check_needed(trial, trials)
        return _run_with_pruning(problem, trial)

    while _needs_trial(study, trials):
        study.optimize(objective, n_trials=1, catch=(_SurplusTrial,))
        after_trial()


def _needs_trial(study: Study, trials: int) -> bool:
    """Whether to start another trial; while the last ones run elsewhere, waits for how they end."""
    while count_finished(study) < trials:
        if count_finished(study) + count_trials(study)["running"] < trials:
            return True
        time.sleep(_POLL_SECONDS)
        fail_stale_trials(study)
    return False


class _SurplusTrial(Exception):
    """Two processes began the last trial at once, and this one is not needed."""


def _check_needed(trial: Trial, trials: int) -> None:
    """Raises where this trial is one too many: the storage numbers trials one at a time, so the highest give way."""
    counted = trial.study.get_trials(deepcopy=False, states=(*_FINISHED, TrialState.RUNNING))
    if sum(other.number < trial.number for other in counted) >= trials:
        trial.set_user_attr(_SURPLUS, True)
        raise _SurplusTrial


def _run_with_pruning(problem: Problem, trial: Trial) -> float:
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


@contextmanager
def open_storage(location: Path | str) -> Iterator[BaseStorage]:
    """Connects to the storage; a journal is locked against other searches, and repaired if a process died writing."""
    if not isinstance(location, Path):
        yield connect(location)
        return
    with _locked(location) as file:
        _remove_stale_lock(location)
        try:
            storage = connect(location)
            _cut_torn_record(file)
        except Exception as error:  # whatever a stranger's file makes Optuna stumble over
            raise BadInput(f"{location}: not a readable search journal; move it away to begin anew") from error
        yield storage


def connect(location: Path | str) -> BaseStorage:
    """A path is a journal file, anything else a database's URL."""
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


def fail_abandoned_trials(study: Study, location: Path | str) -> None:
    """Marks the running trials of a journal as failed, once its owner knows that no process is left to finish them.

    In a database the heartbeat does so.
    """
    if not isinstance(location, Path):
        return
    _remove_stale_lock(location)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    check_not_symlink(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written to ({error.strerror}); choose another place") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{path}: another search is using it; wait for its end, or choose another file") from None
        yield file


def _remove_stale_lock(path: Path) -> None:
    """Optuna's own lock of each record: a killed process may have left it, and the next would wait 30 s for it."""
    Path(f"{path}.lock").unlink(missing_ok=True)


def _cut_torn_record(file: IO[bytes]) -> None:
    """A process killed while it wrote leaves half a line, to which Optuna would append the next record."""
    file.seek(0)
    content = file.read()
    torn = content[content.rfind(b"\n") + 1 :]
    if not torn:
        return
    if torn[: len(_RECORD)] != _RECORD[: len(torn)]:
        raise ValueError("not a record")
    file.truncate(len(content) - len(torn))
    os.fsync(file.fileno())
