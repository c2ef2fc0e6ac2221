"""Where the trials of a search are kept: a journal file of this search's own, or a database shared by machines."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from cmsf.errors import BadInput
from cmsf.files import check_no_link

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
        raise BadInput(f"{known}: no storage for a search ({str(error).splitlines()[0]})") from error


@contextmanager
def _own(path: Path) -> Iterator[IO[bytes]]:
    check_no_link(path)
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
