"""A bar for what takes more than a moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def shown(what: Iterable[T], description: str, total: int) -> Iterable[T]:
    """The same items, with a bar on a terminal that goes when they are done."""
    console = Console(stderr=True)
    return track(what, description, total, console=console, transient=True, disable=not console.is_terminal)
