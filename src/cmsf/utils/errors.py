"""Errors that a user can correct: one line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class BadInput(ValueError):
    """Its message says what is wrong, with the numbers, and the remedy."""


class FailedElsewhere(BadInput):
    """Another process failed, and reports the reason."""


class Interrupted(Exception):
    """A signal asks the run to stop."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the remedy for an unknown name: the nearest known one, or where to look."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def first_few(items: Sequence[str], limit: int = 4, separator: str = "; ") -> str:
    """Joins the first few items, and says how many more there are."""
    return separator.join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
