"""The one kind of error a user can mend: said in a line, with exit code 2 and no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class BadInput(ValueError):
    """What is wrong, the numbers, and what to do about it."""


class FailedElsewhere(BadInput):
    """What stops this process has happened to another, which says what it is."""


class Interrupted(Exception):
    """A signal wants the run to stop."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for a name nobody knows: the nearest known one, or where to look."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def first_few(items: Sequence[str], most: int = 4) -> str:
    """The first few of what may be many."""
    return "; ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
