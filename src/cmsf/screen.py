"""What a person sees while a run goes on: a panel on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console

from cmsf.live import above, can_draw, drawn
from cmsf.panel import JUDGED, TrainingPanel, pseudo_labels
from cmsf.printable import one_line
from cmsf.progress import terminal_taken


class Screen:
    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._panel: TrainingPanel | None = None

    def say(self, text: str) -> None:
        if not self.quiet:
            above(self.console).print(one_line(text), markup=False, emoji=False, soft_wrap=True)

    def bars(self) -> AbstractContextManager[None]:
        """What is done in here has bars, unless the screen is quiet."""
        return terminal_taken() if self.quiet else nullcontext()

    @contextmanager
    def progress(
        self, name: str, epochs: int, total: int, done: int, before: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> Iterator[None]:
        """While it is entered, a panel on a terminal; before: the lines of epochs that are over."""
        if self.quiet or not can_draw(self.console):
            yield
            return
        panel = self._panel = TrainingPanel(name, epochs, total, done)
        panel.remember(before())
        try:
            with terminal_taken(panel.tell), drawn(self.console, panel, transient=False):
                try:
                    yield
                finally:
                    panel.end()
        finally:
            self._panel = None

    def reach(self, step: int) -> None:
        """A step that has no line in the log."""
        if self._panel is not None:
            self._panel.reach(step)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        if self._panel is not None:
            self._panel.step(step, line)

    def epoch(self, line: Mapping[str, Any]) -> None:
        if self._panel is not None:
            self._panel.epoch(line)
            return
        words = [f"epoch {line['epoch'] + 1:3d}", f"loss {line['loss']:.3f}"]
        purity = line.get("purity_unconstrained", math.nan)
        if not math.isnan(purity):  # it has a bank, and some class is known
            chosen = f", {line['purity_constrained']:.2f} in C" if "purity_constrained" in line else ""
            words.append(f"purity {purity:.2f} in M{chosen}")
        if "rank_median" in line:
            words.append(f"median rank {line['rank_median']:.0f}")
        if "pseudo_share" in line:
            words.append(f"pseudo-labels {pseudo_labels(line)}")
        words += [f"{name} {line[name]:.2f} %" for name in JUDGED if name in line]
        if "classifier_groups" in line:
            words[-1] += f" of {line['classifier_groups']} groups"
        self.say("   ".join(words))
