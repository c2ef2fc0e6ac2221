"""Progress on stderr: on a terminal rich's bars, one at a time; elsewhere a plain line now and then."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar, runtime_checkable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from cmsf.utils.text import format_time_left, one_line

REFRESH_PER_SECOND = 2.0
RIGHT_MARGIN = 2
"""Columns left free: a terminal writes ^C there, and a second line would tear what is drawn."""
SPEED_PERIOD = 3600.0
"""Seconds of steps that the time remaining is estimated from; many of ours take longer than rich's 30 s."""
_DESCRIPTION = 12
"""Columns that a description keeps at least."""
_NARROW = 50
"""Columns of a terminal below which the words take the place of the bar."""
_SILENCE, _BETWEEN_LINES = 10.0, 60.0
"""Without a terminal: seconds in which nothing was said before a line, and between two lines at least."""
_POLL_SECONDS = 1.0

T = TypeVar("T")
Listener = Callable[[str], None]

_live_console: ContextVar[Console | None] = ContextVar("_live_console", default=None)
_listener: ContextVar[Listener | None] = ContextVar("_listener", default=None)
"""Whoever draws on the terminal, and is told of progress instead of a bar."""
_prefix: ContextVar[str] = ContextVar("_prefix", default="")


@runtime_checkable
class Update(Protocol):
    """Called with how much is done and a note; resumed: what was done since the last call is not new, so it
    says nothing about the speed."""

    def __call__(self, done: int, note: str = "", resumed: bool = False) -> None: ...


def track(items: Iterable[T], description: str, total: int | None, each: int = 1) -> Iterator[T]:
    """Yields the items, with a progress bar in the meantime.

    total: None if unknown. each: how many of the total an item stands for, such as the images of a batch.
    """
    with progress_bar(description, total) as update:
        for done, item in enumerate(items, 1):
            yield item
            update(each * done if total is None else min(each * done, total))


class _ShrinkingText(TextColumn):
    """Text in one line that gives way where there is little room, so that count and time stay whole."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Update]:
    """Yields a function that updates a bar, which is removed at the end; a bar within a bar is a note beside it.

    Without a terminal there is no bar but a line after ten seconds in which nothing was said, and then one a minute.
    """
    description, listener = one_line(_prefix.get() + description), _listener.get()
    if listener is not None:

        def tell(done: int, note: str = "", resumed: bool = False) -> None:
            count = f"{done:,}" if total is None else f"{min(done + 1, total):,} of {total:,}"
            listener(f"{description} {count}" + (f", {note}" if note else ""))

        tell(0)
        try:
            yield tell
        finally:
            listener("")
        return
    console = Console(stderr=True)
    if not is_terminal(console):
        lines = _PlainLines(description, total, _silence)
        with redirect_progress(lines.set_inner), lines.printed():
            yield lines.update
        return
    bar = _Bar(
        _ShrinkingText(
            "{task.description}", markup=False, table_column=Column(min_width=min(_DESCRIPTION, len(description)))
        ),
        *([BarColumn()] if console.width >= _NARROW else []),
        MofNCompleteColumn(separator=" of ", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _ShrinkingText("{task.fields[note]}", markup=False, table_column=Column()),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
        speed_estimate_period=SPEED_PERIOD,
        transient=True,
        redirect_stdout=stdout_is_terminal(),
    )
    task, own_note = bar.add_task(description, total=total, note=""), ""

    def update(done: int, note: str = "", resumed: bool = False) -> None:
        nonlocal own_note
        own_note = note
        if resumed:
            bar.reset(task, completed=done)
        bar.update(task, completed=done, note=note)

    with redirect_progress(lambda inner: bar.update(task, note=inner or own_note)), live_display(bar.live):
        yield update


class _Silence:
    """Knows when a line is due where there is no terminal: bars that follow one another share its clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._since = self._line = self._ended = -math.inf

    def begin(self) -> None:
        """Counts from now on, unless a bar has only just ended."""
        if self.now() - self._ended >= _SILENCE:
            self._since = self.now()

    def end(self) -> None:
        self._ended = self.now()

    def message_printed(self) -> None:
        self._since = self.now()

    def line_printed(self) -> None:
        self._since = self._line = self.now()

    @property
    def line_is_due(self) -> bool:
        return self.now() - self._since >= _SILENCE and self.now() - self._line >= _BETWEEN_LINES


_silence = _Silence()


def message_printed() -> None:
    """Says that a user has just read something: the next line of progress can wait."""
    _silence.message_printed()


class _PlainLines:
    """What a bar says where there is no terminal."""

    def __init__(self, description: str, total: int | None, silence: _Silence) -> None:
        self.description, self.total, self._silence = description, total, silence
        self._done, self._note, self._inner = 0, "", ""
        self._first, self._began = 0, silence.now()
        self._updated = self._began

    def update(self, done: int, note: str = "", resumed: bool = False) -> None:
        self._done, self._note, self._updated = done, note, self._silence.now()
        if resumed:
            self._first, self._began = done, self._updated

    def set_inner(self, progress: str) -> None:
        self._inner = progress

    @property
    def line(self) -> str:
        """Returns such as: features 2,560 of 50,000, 1 min left."""
        if self.total is not None:
            count = f" {self._done:,} of {self.total:,}"
        else:
            count = f" {self._done:,}" if self._done else ""
        return ", ".join(filter(None, [self.description + count, self._inner or self._note, self._time_left]))

    @property
    def _time_left(self) -> str:
        done = self._done - self._first
        if self.total is None or done <= 0:
            return ""
        pace = (self._updated - self._began) / done
        left = pace * (self.total - self._done) - (self._silence.now() - self._updated)
        return format_time_left(left) if left > 0 else ""

    @contextmanager
    def printed(self) -> Iterator[None]:
        """Prints lines in its block when they are due; by a thread, for what is counted may take minutes a piece."""
        ended, stderr = threading.Event(), sys.stderr  # which a library's block may redirect meanwhile

        def watch() -> None:
            while not ended.wait(_POLL_SECONDS):
                if self._silence.line_is_due:
                    with suppress(OSError, ValueError):  # stderr may be full or closed
                        print(one_line(self.line), file=stderr, flush=True)
                    self._silence.line_printed()

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        self._silence.begin()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._silence.end()


def progress_prefix(description: str) -> AbstractContextManager[None]:
    """Puts a description before that of every bar in its block."""
    return _set(_prefix, f"{_prefix.get()}{description}: ")


def redirect_progress(listener: Listener = lambda progress: None) -> AbstractContextManager[None]:
    """Draws no bars in its block: the listener is called with their text instead, and with "" at the end of each."""
    return _set(_listener, listener)


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a context variable in its block."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)  # not by a token: a generator may be closed in another context


def bars_enabled() -> bool:
    return _listener.get() is None and is_terminal(Console(stderr=True))


def is_terminal(console: Console) -> bool:
    """Returns whether a console is a terminal; FORCE_COLOR and the like do not make one of a file."""
    return console.is_interactive and console.file.isatty()


def stdout_is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


@contextmanager
def live_display(live: Live) -> Iterator[None]:
    """Draws a live display, below whatever is printed in its block."""
    with _set(_live_console, live.console), live:
        # A cursor that is never hidden need not be restored, not even by a process that is killed or suspended.
        live.console.show_cursor(True)
        yield


def console_above(console: Console) -> Console:
    """Returns the console of the live display, where one is drawn: lines printed to it appear above; else `console`."""
    return _live_console.get() or console


class _Bar(Progress):
    def get_renderable(self) -> RenderableType:
        return Padding(super().get_renderable(), (0, RIGHT_MARGIN, 0, 0), expand=False)


def _restore_streams() -> None:
    """Gives a forked process the terminal itself: the display, and the lock on it, are its parent's."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_streams)
