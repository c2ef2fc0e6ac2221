"""SIGINT and SIGTERM: heeded between two steps, after a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_THE_SAME = 2.0
"""Within so many seconds, two signals are one that came by two ways."""


class Stopped(Exception):
    """A signal ended the run; the same command goes on from there.

    saved: whether there was room for a checkpoint.
    """

    def __init__(self, signal_number: int, saved: bool = True) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number, self.saved = signal_number, saved


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM wait here until the step is done; a second Ctrl-C, a while later, ends the process at once.

    Not at once, and not by SIGTERM: a scheduler sends that to a launcher and to the processes that it started, and the
    launcher hands it on.
    """
    caught: list[int] = []
    previous: dict[signal.Signals, Any] = {}
    first = 0.0

    def catch(signal_number: int, frame: FrameType | None) -> None:
        nonlocal first
        if caught and signal_number == signal.SIGINT and time.monotonic() - first > _THE_SAME:
            raise KeyboardInterrupt
        first = first or time.monotonic()
        caught.append(signal_number)

    for each in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[each] = signal.signal(each, catch)
        except ValueError:  # not in the main thread: whoever owns the process handles its signals
            break
    try:
        yield caught
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
