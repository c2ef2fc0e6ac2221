"""SIGINT and SIGTERM: handled between two steps or in the middle of an evaluation, after a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cmsf.utils.errors import Interrupted

_DUPLICATE_SECONDS = 2.0
"""Two signals within this time are one that arrived twice."""


class Stopped(Exception):
    """A signal ended the run; the same command resumes it.

    saved: whether there was room for a checkpoint.
    """

    def __init__(self, signal_number: int, saved: bool = True) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number, self.saved = signal_number, saved


class SignalHandler:
    """Defers SIGINT and SIGTERM until the step is done; a second Ctrl-C, a while later, ends the process at once.

    A second SIGTERM does not: a scheduler sends it to a launcher and to its processes, and the launcher passes it on.

    signal_number: the first signal received; 0 for none.
    """

    def __init__(self) -> None:
        self.signal_number, self._first = 0, 0.0
        self._interruptible = False
        self._previous: dict[signal.Signals, Any] = {}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work in here takes long, and a signal raises Interrupted at once: a resumed run does it again."""
        self._interruptible = True
        try:
            if self.signal_number:
                raise Interrupted(self.signal_number)
            yield
        finally:
            self._interruptible = False

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        again = bool(self.signal_number)
        if again and signal_number == signal.SIGINT and time.monotonic() - self._first > _DUPLICATE_SECONDS:
            raise KeyboardInterrupt
        if not again:
            self.signal_number, self._first = signal_number, time.monotonic()
            if self._interruptible:
                raise Interrupted(signal_number)

    def __enter__(self) -> SignalHandler:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: whoever owns the process handles its signals
                break
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
