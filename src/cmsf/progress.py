"""A bar for what takes more than a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar, runtime_checkable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from cmsf.live import FREE, TimeLeft, can_draw, clock, drawn
from cmsf.printable import one_line

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
def terminal_taken(tell: Tell = _nobody) -> Iterator[None]:
    """While something else draws on the terminal, no bars are shown: two would write over one another.

    tell: hears what they would have said instead, and nothing when they would go.
    """
    before = _told.get()
    _told.set(tell)
    try:
        yield
    finally:
        _told.set(before)  # and not by a token: a generator may be closed in another context


def bars_wanted() -> bool:
    """Whether there is a terminal, and nobody draws on it."""
    return _told.get() is None and can_draw(Console(stderr=True))


@contextmanager
def part_of(what: str) -> Iterator[None]:
    """What is done in here is a part of something, which its bars then say."""
    before = _part_of.get()
    _part_of.set(f"{before}{what}: ")
    try:
        yield
    finally:
        _part_of.set(before)


def shown(what: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """The same items, with a bar on a terminal that goes when they are done. total: None where nobody knows."""
    with bar(description, total) as at:
        for done, item in enumerate(what, 1):
            yield item
            at(done)


@contextmanager
def bar(description: str, total: int | None) -> Iterator[Update]:
    """A bar on a terminal, to be told how much is done; bars within it are a word beside it."""
    said, tell = one_line(_part_of.get() + description), _told.get()
    if tell is not None:
        try:
            yield _telling(tell, said, total)
        finally:
            tell("")
        return
    console = Console(stderr=True)
    if not can_draw(console):
        yield lambda done, note="", found=False: None
        return
    line = _Line(said, total)
    with terminal_taken(line.tell), drawn(console, line, transient=True):
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
        how_far = Text(f"{count}  {clock(self.time.gone) if left is None else f'{clock(left)} left'}")
        said, note = Text(self.said), Text(self.doing or self.note)
        width = max(1, options.max_width - FREE)
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
