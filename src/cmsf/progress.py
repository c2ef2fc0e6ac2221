"""A bar for what takes more than a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")

_taken = ContextVar("_taken", default=False)


@contextmanager
def terminal_taken() -> Iterator[None]:
    """While something else draws on the terminal, no bars are shown: two would write over one another."""
    before = _taken.set(True)
    try:
        yield
    finally:
        _taken.reset(before)


def shown(what: Iterable[T], description: str, total: int) -> Iterator[T]:
    """The same items, with a bar on a terminal that goes when they are done."""
    console = Console(stderr=True)
    if _taken.get() or not console.is_terminal:
        yield from what
        return
    _taken.set(True)
    try:
        yield from track(what, description, total, console=console, transient=True)
    finally:
        _taken.set(False)
