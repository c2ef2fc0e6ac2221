"""Experiments as cells: one JSON file each, written when it is done, so that they may be stopped, and shared."""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from cmsf.runs.environment import describe_machine
from cmsf.utils.files import write_text


class Cell(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Cell)


def compute_all(
    cells: Iterable[C], out: Path, runs: Path, compute: Callable[[C], dict[str, Any]], ready: Callable[[C], bool]
) -> None:
    """Every cell that is not there yet, nobody else computes, and is ready: what it needs is there."""
    for folder in (out, runs):
        folder.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        file = out / f"{cell.name}.json"
        if file.exists() or not ready(cell):
            continue
        with claimed(runs / f"{cell.name}.claim") as mine:
            if mine and not file.exists():
                start = time.monotonic()
                found = compute(cell) | describe_machine("cpu")
                found |= {"minutes": round((time.monotonic() - start) / 60, 2)}
                write_text(file, json.dumps(found, indent=1) + "\n")
                print(file.name, flush=True)


def compute_from_command_line(
    about: str | None, cells: Iterable[C], compute: Callable[[C, Path, Path, Path], dict[str, Any]], runs: str
) -> None:
    """Computes the cells with one thread; compute: from a cell, the data, the cells of bench/baselines.py, the runs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--chosen", type=Path, default=Path("docs/results/baselines"), help="cells of bench/baselines.py"
    )
    parser.add_argument("--runs", type=Path, default=Path(runs))
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(
        cells, given.out, given.runs, lambda cell: compute(cell, given.data, given.chosen, given.runs), lambda _: True
    )


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether this process may compute a cell. The claim is a lock, which ends with the process, however it ends."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def read(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def mean_and_range(values: Iterable[float | None], wanted: int) -> str:
    """Of what is there; how many that is, where some are missing."""
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    missing = "" if len(found) == wanted else f" [{len(found)} of {wanted}]"
    return f"{sum(found) / len(found):.2f} ({min(found):.2f} to {max(found):.2f}){missing}"
