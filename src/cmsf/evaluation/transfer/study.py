"""The search as an Optuna study: its storage, what it samples, what it prunes, and when it is finished."""

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
from typing import IO, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, fail_stale_trials
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from cmsf.evaluation.transfer.trial import Problem, draw, run, rungs
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_not_symlink
from cmsf.utils.text import first_line


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


_HEARTBEAT = 30
"""Seconds between a trial's signs of life in a database; after four without one it is given up."""
_RECORD = b'{"op_code":'


def connect(where: Path | str) -> BaseStorage:
    """A path is a journal file, anything else a database's URL."""
    return JournalStorage(JournalFileBackend(str(where))) if isinstance(where, Path) else _database(where)


@contextmanager
def opened(where: Path | str) -> Iterator[BaseStorage]:
    """The storage, and a journal for nobody else."""
    if not isinstance(where, Path):
        yield connect(where)
        return
    with _own(where) as file:
        _give_back_lock(where)
        try:
            storage = connect(where)
            _cut_torn_record(file)
        except Exception as error:  # whatever a stranger's file makes Optuna stumble over
            raise BadInput(f"{where}: not a readable search journal; move it away to begin anew") from error
        yield storage


def fail_left_over(study: Study, where: Path | str) -> None:
    """Give up the trials of processes that have ended. In a database the heartbeat does; of a journal, its owner knows
    when nobody else is at work."""
    if not isinstance(where, Path):
        return
    _give_back_lock(where)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


def _database(url: str) -> RDBStorage:
    # Where two processes write at once, SQLite has one wait: longer than its five seconds, on a slow disk.
    patience = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    try:
        return RDBStorage(url, engine_kwargs=patience, heartbeat_interval=_HEARTBEAT, grace_period=4 * _HEARTBEAT)
    except ArgumentError as error:
        raise BadInput("--storage takes a database's URL, such as sqlite:///search.db") from error
    except Exception as error:  # a missing driver, a host that does not answer, a schema of another version
        known = make_url(url).render_as_string(hide_password=True)
        raise BadInput(f"{known}: no storage for a search ({first_line(error)})") from error


@contextmanager
def _own(path: Path) -> Iterator[IO[bytes]]:
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


def _give_back_lock(path: Path) -> None:
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


FIRST_RUNG, REDUCTION = 4, 2
"""Successive halving: after 4, 8, 16, … iterations a trial goes on if it is in the upper half of all that came so far.
Its cost is bounded whatever iterations are drawn: each rung is twice as long, and half as many reach it.
"""
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_SURPLUS = "surplus"
_LOOK_AGAIN = 0.5


def begin(storage: BaseStorage, name: str, problem: Problem, seed: int, prune: bool) -> Study:
    """The study of this name, new or as far as it has come."""
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize",
        load_if_exists=True,
        sampler=SeededByTrial(seed),
        pruner=SuccessiveHalvingPruner(min_resource=FIRST_RUNG, reduction_factor=REDUCTION) if prune else NopPruner(),
    )
    known, mine = study.user_attrs.get("problem"), _outline(problem)
    if known is None:
        study.set_user_attr("problem", mine)
    elif known != mine:
        raise BadInput(f"the search {name} was begun on other images ({known}, now {mine}); choose another storage")
    return study


def work(study: Study, problem: Problem, trials: int, look: Callable[[], None] = lambda: None) -> None:
    """Run trials until the study has enough, whoever else takes part in it."""
    objective = TrialObjective(problem, trials)
    while _wanted(study, trials):
        study.optimize(objective, n_trials=1, catch=(_Surplus,))
        look()


def counts(study: Study) -> Counter[str]:
    """Trials by state; those that nobody needed are not counted."""
    trials = study.get_trials(deepcopy=False)
    return Counter(trial.state.name.lower() for trial in trials if _SURPLUS not in trial.user_attrs)


def finished(study: Study) -> int:
    found = counts(study)
    return sum(found[state.name.lower()] for state in _FINISHED)


class _Surplus(Exception):
    """Two processes began the last trial at once, and this one is not needed."""


class TrialObjective:
    def __init__(self, problem: Problem, trials: int) -> None:
        self._problem, self._trials = problem, trials

    def __call__(self, trial: Trial) -> float:
        self._make_sure_of_need(trial)
        settings = draw(trial)
        reached = 0

        def report(iteration: int, value: float) -> None:
            nonlocal reached
            reached = iteration
            trial.report(value, iteration)
            if trial.should_prune():
                raise optuna.TrialPruned

        value = run(self._problem, settings, report)
        for rung in rungs(settings.iterations):
            if rung > reached:  # it has converged before, and others are still compared with it there
                trial.report(value, rung)
        return value

    def _make_sure_of_need(self, trial: Trial) -> None:
        """Numbers are given by the storage, one at a time: of too many, the highest go."""
        live = trial.study.get_trials(deepcopy=False, states=(*_FINISHED, TrialState.RUNNING))
        if sum(other.number < trial.number for other in live) >= self._trials:
            trial.set_user_attr(_SURPLUS, True)
            raise _Surplus


class SeededByTrial(BaseSampler):
    """TPE with a seed for each trial, made of the search's seed and the trial's number: no two processes or machines
    draw the same, and a search that was stopped between two trials goes on as if it had not been."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tpe = TPESampler(seed=seed)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        own = np.random.SeedSequence([self._seed, trial.number]).generate_state(1)
        # Trials that others are running count as bad ones, lest all processes try the same spot.
        self._tpe = TPESampler(seed=int(own[0]), constant_liar=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._tpe.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)


def _wanted(study: Study, trials: int) -> bool:
    """Whether another trial is needed; while the last ones run elsewhere, wait for how they end."""
    while finished(study) < trials:
        if finished(study) + counts(study)["running"] < trials:
            return True
        time.sleep(_LOOK_AGAIN)
        fail_stale_trials(study)
    return False


def _outline(problem: Problem) -> str:
    """Enough to tell another data set; not the features, whose last bits differ between machines."""
    labels = zlib.crc32(problem.val_label.numpy().tobytes(), zlib.crc32(problem.train_label.numpy().tobytes()))
    images = f"{len(problem.train)} + {len(problem.val)} images, {problem.train.shape[1]} features"
    return f"{images}, {problem.classes} classes, labels {labels:08x}"
