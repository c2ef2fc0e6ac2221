"""What is drawn on a terminal again and again: how often, how long it will take, and how it leaves the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES = 2.0
"""A second: often enough for a clock, and so seldom that drawing costs nothing that could be measured."""
FREE = 2
"""Columns at the right: a terminal writes ^C there, and would tear what is drawn if that took another line."""

_drawn_on: ContextVar[Console | None] = ContextVar("_drawn_on", default=None)


def can_draw(console: Console) -> bool:
    """Whether somebody may be looking; FORCE_COLOR and the like make no terminal of a file."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def drawn(console: Console, picture: RenderableType, transient: bool) -> Iterator[None]:
    """While it is entered, the picture is the last thing on the terminal, and what is printed comes above it."""
    live = Live(
        picture,
        console=console,
        refresh_per_second=REFRESHES,
        transient=transient,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # what goes into a file still does
    )
    before = _drawn_on.get()
    _drawn_on.set(console)
    try:
        with live:
            # Never hidden, it need not be put back: not by a process that is killed either, or stopped by Ctrl-Z.
            console.show_cursor(True)
            yield
    finally:
        _drawn_on.set(before)


def above(console: Console) -> Console:
    """Where to print what was meant for this one: above what is being drawn, where something is."""
    return _drawn_on.get() or console


class TimeLeft:
    """How long something takes, judged by the pace so far."""

    def __init__(self, total: int | None, done: int = 0, now: Callable[[], float] = time.monotonic) -> None:
        self.total, self.now = total, now
        self._first, self._begun = done, now()
        self._last = done, self._begun
        self._ended: float | None = None

    @property
    def done(self) -> int:
        return self._last[0]

    def at(self, done: int, found: bool = False) -> None:
        """found: what is new of it was there already, and says nothing of the pace."""
        self._first += done - self.done if found else 0
        self._last = done, self.now()

    def end(self) -> None:
        """The clock stops."""
        self._ended = self.now()

    @property
    def gone(self) -> float:
        return (self.now() if self._ended is None else self._ended) - self._begun

    @property
    def left(self) -> float | None:
        """Seconds, fewer with every one that passes; None where nobody knows yet, or where it has ended."""
        done, when = self._last
        if self.total is None or self._ended is not None or done <= self._first:
            return None
        pace = (when - self._begun) / (done - self._first)
        return max(0.0, pace * (self.total - done) - (self.now() - when))


def clock(seconds: float) -> str:
    """As 0:07 or 26:03:07."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _own_streams() -> None:
    """A forked process writes to the terminal itself: what is drawn, and the lock on it, are its parent's."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own_streams)
