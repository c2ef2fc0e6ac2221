"""Progress bars, and how live output shares the terminal with printed lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar, runtime_checkable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from cmsf.utils.text import format_duration, one_line

REFRESH_PER_SECOND = 2.0
"""A second: often enough for a clock, and so seldom that drawing costs nothing that could be measured."""
RIGHT_MARGIN = 2
"""Columns at the right: a terminal writes ^C there, and would tear what is drawn if that took another line."""

_drawn_on: ContextVar[Console | None] = ContextVar("_drawn_on", default=None)


def is_terminal(console: Console) -> bool:
    """Whether somebody may be looking; FORCE_COLOR and the like make no terminal of a file."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def live_display(console: Console, picture: RenderableType, transient: bool) -> Iterator[None]:
    """While it is entered, the picture is the last thing on the terminal, and what is printed comes above it."""
    live = Live(
        picture,
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
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


def console_above(console: Console) -> Console:
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


def _own_streams() -> None:
    """A forked process writes to the terminal itself: what is drawn, and the lock on it, are its parent's."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own_streams)


T = TypeVar("T")

_WIDEST = 40
_NARROWEST = 8
"""Columns of a bar; where there is less room, there is none."""


@runtime_checkable
class Update(Protocol):
    """To be called with how much is done, and what else there is to say; found: it was done before this began."""

    def __call__(self, done: int, note: str = "", found: bool = False) -> None: ...


Tell = Callable[[str], None]

_told: ContextVar[Tell | None] = ContextVar("_told", default=None)
"""Who draws on the terminal, and wants to know what is being done meanwhile."""
_part_of: ContextVar[str] = ContextVar("_part_of", default="")


def _nobody(doing: str) -> None:
    return


@contextmanager
def redirect_progress(tell: Tell = _nobody) -> Iterator[None]:
    """While something else draws on the terminal, no bars are shown: two would write over one another.

    tell: hears what they would have said instead, and nothing when they would go.
    """
    before = _told.get()
    _told.set(tell)
    try:
        yield
    finally:
        _told.set(before)  # and not by a token: a generator may be closed in another context


def bars_enabled() -> bool:
    """Whether there is a terminal, and nobody draws on it."""
    return _told.get() is None and is_terminal(Console(stderr=True))


@contextmanager
def progress_prefix(what: str) -> Iterator[None]:
    """What is done in here is a part of something, which its bars then say."""
    before = _part_of.get()
    _part_of.set(f"{before}{what}: ")
    try:
        yield
    finally:
        _part_of.set(before)


def track(what: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """The same items, with a bar on a terminal that goes when they are done. total: None where nobody knows."""
    with progress_bar(description, total) as at:
        for done, item in enumerate(what, 1):
            yield item
            at(done)


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Update]:
    """A bar on a terminal, to be told how much is done; bars within it are a word beside it."""
    said, tell = one_line(_part_of.get() + description), _told.get()
    if tell is not None:
        try:
            yield _telling(tell, said, total)
        finally:
            tell("")
        return
    console = Console(stderr=True)
    if not is_terminal(console):
        yield lambda done, note="", found=False: None
        return
    line = _Line(said, total)
    with redirect_progress(line.tell), live_display(console, line, transient=True):
        yield line.at


def _telling(tell: Tell, said: str, total: int | None) -> Update:
    def at(done: int, note: str = "", found: bool = False) -> None:
        count = f"{done:,}" if total is None else f"{min(done + 1, total):,} of {total:,}"
        tell(f"{said} {count}" + (f", {note}" if note else ""))

    at(0)
    return at


class _Line:
    """What is being done, how much of it is, and how long the rest will take; in one line of any width."""

    def __init__(self, said: str, total: int | None) -> None:
        self.said, self.time, self.note, self.doing = said, TimeLeft(total), "", ""

    def at(self, done: int, note: str = "", found: bool = False) -> None:
        self.note = note
        self.time.at(done, found)

    def tell(self, doing: str) -> None:
        self.doing = doing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, total, left = self.time.done, self.time.total, self.time.left
        count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        how_far = Text(
            f"{count}  {format_duration(self.time.gone) if left is None else f'{format_duration(left)} left'}"
        )
        said, note = Text(self.said), Text(self.doing or self.note)
        width = max(1, options.max_width - RIGHT_MARGIN)
        # How far it is comes first, then what it is, then a bar, then the note; each has the room that is left.
        said.truncate(max(1, width - how_far.cell_len - 1), overflow="ellipsis")
        room = width - how_far.cell_len - said.cell_len - 1
        cells: list[Text | ProgressBar] = [said, how_far]
        if room > _NARROWEST:
            wanted = min(_WIDEST, max(_NARROWEST, room - 1 - (note.cell_len + 1 if note else 0)))
            cells.insert(1, ProgressBar(total, min(done, total or done), wanted, pulse=total is None))
            room -= wanted + 1
        if note and room > 1:
            note.truncate(room - 1, overflow="ellipsis")
            cells.append(note)
        line = Table.grid(*(Column(no_wrap=True) for _ in cells), padding=(0, 1))
        line.add_row(*cells)
        yield Constrain(line, width)
