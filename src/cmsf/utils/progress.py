"""Progress bars: rich's, on stderr, one at a time, and only on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar, runtime_checkable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from cmsf.utils.text import one_line

REFRESH_PER_SECOND = 2.0
RIGHT_MARGIN = 2
"""Columns left free: a terminal writes ^C there, and a second line would tear what is drawn."""
SPEED_PERIOD = 3600.0
"""Seconds of steps that the time remaining is estimated from; many of ours take longer than rich's 30 s."""
_DESCRIPTION = 12
"""Columns that a description keeps at least."""
_NARROW = 50
"""Columns of a terminal below which the words take the place of the bar."""

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


def track(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """Yields the items, with a bar on a terminal that is removed at the end; total: None if unknown."""
    with progress_bar(description, total) as update:
        for done, item in enumerate(items, 1):
            yield item
            update(done)


class _ShrinkingText(TextColumn):
    """Text in one line that gives way where there is little room, so that count and time stay whole."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


@contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Update]:
    """Yields a function that updates a bar; a bar within a bar is shown as a note beside it."""
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
        yield lambda done, note="", resumed=False: None
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
