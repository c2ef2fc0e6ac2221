"""Processes of their own, cheaply: forked from one that has imported torch and cmsf, which alone takes five seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cmsf.cli import main

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["cmsf.api", "cmsf.cli", "pytest"])

PATIENCE = 300.0


class Started:
    """A process in a session of its own, which ends with what some work returns; used like subprocess.Popen.

    environment: beside that of this process; limit: the largest file it may write. What it says on standard error is
    kept.
    """

    def __init__(
        self,
        work: Callable[..., int | None],
        *given: Any,
        environment: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        said = f"/proc/{os.getpid()}/fd/{self._said.fileno()}"
        arguments = (work, given, said, os.environ | (environment or {}), limit)
        self._process = _FORKED.Process(target=_begin, args=arguments)
        self._process.start()
        atexit.register(self._process.kill)  # or else a test that has failed is waited for at the end
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = PATIENCE) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"not done after {timeout} s; it said {self.said()}")
        return self.returncode

    def said(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def communicate(self, timeout: float = PATIENCE) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.said()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def cmsf_command(*arguments: str | Path, **how: Any) -> Started:
    """What `cmsf ARGUMENTS` does, in a process."""
    return Started(main, [str(argument) for argument in arguments], **how)


def _begin(
    work: Callable[..., int | None], given: tuple[Any, ...], said: str, environment: dict[str, str], limit: int | None
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored by all it starts
    multiprocessing.set_start_method("fork", force=True)  # as it is where nobody has been forked
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may be another there
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), 2)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(work(*given))
