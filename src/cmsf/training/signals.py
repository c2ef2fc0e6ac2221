"""SIGINT and SIGTERM: heeded between two steps or in the middle of an evaluation, after a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from cmsf.utils.errors import Interrupted

_THE_SAME = 2.0
"""Within so many seconds, two signals are one that came by two ways."""


class Stopped(Exception):
    """A signal ended the run; the same command goes on from there.

    saved: whether there was room for a checkpoint.
    """

    def __init__(self, signal_number: int, saved: bool = True) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number, self.saved = signal_number, saved


class Caught:
    """While it is entered, SIGINT and SIGTERM wait until the step is done; a second Ctrl-C ends the process at once.

    A second one that comes a while later, that is, and not SIGTERM: a scheduler sends that to a launcher and to the
    processes that it started, and the launcher hands it on.

    signal_number: the first that came; 0 for none.
    """

    def __init__(self) -> None:
        self.signal_number, self._first = 0, 0.0
        self._interrupts = False
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """What is done in here may take long and be broken off anywhere: it changes nothing that is not done again."""
        self._interrupts = True
        try:
            if self.signal_number:
                raise Interrupted(self.signal_number)
            yield
        finally:
            self._interrupts = False

    def _catch(self, signal_number: int, frame: FrameType | None) -> None:
        again = bool(self.signal_number)
        if again and signal_number == signal.SIGINT and time.monotonic() - self._first > _THE_SAME:
            raise KeyboardInterrupt
        if not again:
            self.signal_number, self._first = signal_number, time.monotonic()
            if self._interrupts:
                raise Interrupted(signal_number)

    def __enter__(self) -> Caught:
        for each in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[each] = signal.signal(each, self._catch)
            except ValueError:  # not in the main thread: whoever owns the process handles its signals
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
