"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cmsf.printable import one_line
from cmsf.progress import terminal_taken


class Screen:
    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(one_line(text), markup=False, emoji=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        if self.quiet or not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with terminal_taken(), Progress(*columns, console=self.console) as self._progress:
            self._task = self._progress.add_task("training", total=total, completed=done, now="")
            yield
        self._progress = None

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        if self._progress is not None:
            now = f"epoch {line['epoch'] + 1}  loss {line['loss']:.3f}  {line['images_per_second']:.0f} images/s"
            self._progress.update(self._task, completed=step, now=now)

    def epoch(self, line: Mapping[str, Any]) -> None:
        words = [f"epoch {line['epoch'] + 1:3d}", f"loss {line['loss']:.3f}"]
        purity = line.get("purity_unconstrained", math.nan)
        if not math.isnan(purity):  # it has a bank, and some class is known
            chosen = f", {line['purity_constrained']:.2f} in C" if "purity_constrained" in line else ""
            words.append(f"purity {purity:.2f} in M{chosen}")
        if "rank_median" in line:
            words.append(f"median rank {line['rank_median']:.0f}")
        if "pseudo_share" in line:
            words.append(_pseudo_labels(line))
        words += [f"{name} {line[name]:.2f} %" for name in ("1-nn", "20-nn", "classifier") if name in line]
        if "classifier_groups" in line:
            words[-1] += f" of {line['classifier_groups']} groups"
        self.say("   ".join(words))


def _pseudo_labels(line: Mapping[str, Any]) -> str:
    right = line["pseudo_accuracy_confident"]
    judged = f", {100 * right:.0f} % of them right" if right == right else ""  # not NaN: there are some, and the truth
    return f"pseudo-labels {100 * line['pseudo_share']:.1f} %{judged}"
