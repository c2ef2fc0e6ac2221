"""What a user sees of a training run: a live panel on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cmsf.utils.numbers import is_measurement
from cmsf.utils.progress import (
    REFRESH_PER_SECOND,
    RIGHT_MARGIN,
    SPEED_PERIOD,
    console_above,
    is_terminal,
    live_display,
    message_printed,
    progress_bar,
    redirect_progress,
    stdout_is_terminal,
)
from cmsf.utils.text import format_duration, one_line

_ACCURACIES = ("1-nn", "20-nn", "classifier", "held_out", "view_agreement")
"""Keys of an epoch's line that are accuracies in per cent."""
_MAX_WIDTH = 76
"""Columns. A frame that is narrower than most windows is not torn when a window is made narrower."""
_HISTORY = 16
_LARGEST_SHOWN = 1e9
_BLOCKS = "▁▂▃▄▅▆▇█"


class TrainingPanel:
    """Shows steps, and lines of the log; rendered by rich's thread at any time."""

    def __init__(
        self, name: str, epochs: int, total: int, done: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.epochs = name, epochs
        self._progress = Progress(disable=True, get_time=now, speed_estimate_period=SPEED_PERIOD)
        self._progress.add_task(name, total=total, completed=done)
        (self._task,) = self._progress.tasks
        self._step: Mapping[str, Any] = {}
        self._epoch: Mapping[str, Any] = {}
        self._accuracies: dict[str, deque[float]] = {name: deque(maxlen=_HISTORY) for name in _ACCURACIES}
        self._status = ""

    def advance(self, step: int) -> None:
        self._progress.update(self._task.id, completed=step)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        self.advance(step)
        self._step = dict(line)

    def epoch(self, line: Mapping[str, Any]) -> None:
        self._epoch = dict(line)
        self.add_accuracies(line)

    def add_accuracies(self, line: Mapping[str, Any]) -> None:
        """Takes the accuracies of an epoch, from a file that may hold anything."""
        for name, values in self._accuracies.items():
            if is_measurement(line.get(name), _LARGEST_SHOWN):
                values.append(float(line[name]))

    def set_status(self, status: str) -> None:
        self._status = status

    def stop(self) -> None:
        """Stops the clock; the last frame stays on the terminal."""
        self._status = ""
        self._progress.stop_task(self._task.id)

    @property
    def elapsed(self) -> float:
        return self._task.elapsed or 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the speed so far; None while it is unknown, and once the clock has stopped."""
        return None if self._task.stop_time is not None else self._task.time_remaining

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        done, total = int(self._task.completed), int(self._task.total or 1)
        for name, value in self._rows(done, total, options.ascii_only):
            rows.add_row(name, value)
        width = max(1, min(options.max_width - RIGHT_MARGIN, _MAX_WIDTH))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total, done, max(1, width - 4 - len(" 100 %"))), f"{done / total:4.0%}".replace("%", " %")
        )
        yield Panel(Group(bar, rows), title=Text(self.name, "bold"), title_align="left", width=width)

    def _rows(self, step: int, total: int, plain: bool) -> list[tuple[str, Text]]:
        """Returns names and values; plain: without arrows and sparklines, for a terminal of ASCII."""
        remaining, status = self.remaining, self._status
        time_row = format_duration(self.elapsed) + ("" if remaining is None else f", {format_duration(remaining)} left")
        rows = [("step", Text(f"{step:,} of {total:,}, {_epoch(step, self.epochs, total)}")), ("time", Text(time_row))]
        rows += [(name, Text(", ".join(words))) for name, words in _step_rows(self._step) if words]
        if "pseudo_share" in self._epoch:
            rows.append(("pseudo-labels", Text(_format_pseudo_labels(self._epoch))))
        rows += [
            (name.replace("_", " "), _format_history(list(values), plain))
            for name, values in self._accuracies.items()
            if values
        ]
        return [*rows, ("now", Text(status))] if status else rows


def _epoch(step: int, epochs: int, total: int) -> str:
    """Returns which epoch a step belongs to; an epoch's last step is its own, while it is validated."""
    return f"epoch {max(0, step - 1) * epochs // total + 1} of {epochs}"


def _step_rows(line: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns a name for each row, and its values, as far as the line has them."""
    terms = {name: f"{name.removeprefix('loss_')} {{:.4f}}" for name in line if name.startswith("loss_")}
    templates = {
        "speed": {"images_per_second": "{:,.1f} images/s"},
        "loss": {"loss": "{:.4f}"} | terms,
        "purity": {"purity_unconstrained": "{:.3f} in M", "purity_constrained": "{:.3f} in C"},
        "median rank": {"rank_median": "{:,g}"},
        "embeddings": {"spread": "spread {:.3f}", "effective_rank": "effective rank {:.1f}"},
    }
    return [
        (row, [text.format(line[key]) for key, text in keys.items() if is_measurement(line.get(key), _LARGEST_SHOWN)])
        for row, keys in templates.items()
    ]


def _format_history(values: Sequence[float], plain: bool) -> Text:
    """Returns the last value, its difference to the one before, and a sparkline."""
    text = Text(f"{values[-1]:.2f} %")
    if len(values) > 1:
        change = round(values[-1] - values[-2], 2)
        arrow = "" if plain else "↑ " if change > 0 else "↓ " if change < 0 else "→ "
        text.append(f"  {arrow}{change:+.2f}", "green" if change > 0 else "red" if change < 0 else "")
        text.append("" if plain else f"  {sparkline(values)}")
    return text


def sparkline(values: Sequence[float]) -> str:
    """Returns a block per value, as high as it is between the minimum and the maximum."""
    lowest, highest = min(values), max(values)
    if lowest == highest:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[round((value - lowest) / (highest - lowest) * (len(_BLOCKS) - 1))] for value in values)


def _format_pseudo_labels(line: Mapping[str, Any]) -> str:
    accuracy = line["pseudo_accuracy_confident"]
    right = "" if math.isnan(accuracy) else f", {100 * accuracy:.0f} % of them right"
    trust = f", trust {line['pseudo_trust']:.0f} %" if "pseudo_trust" in line else ""
    return f"{100 * line['pseudo_share']:.1f} %{right}{trust}"


def _nothing(step: int) -> None:
    return


class Screen:
    """Prints messages and the progress of training to stderr; quiet: nothing."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._panel: TrainingPanel | None = None
        self._count: Callable[[int], None] = _nothing

    def print(self, text: str) -> None:
        if not self.quiet:
            message_printed()
            console_above(self.console).print(one_line(text), markup=False, emoji=False, soft_wrap=True)

    def bars(self) -> AbstractContextManager[None]:
        """Shows progress bars in its block, unless the screen is quiet."""
        return redirect_progress() if self.quiet else nullcontext()

    @contextmanager
    def training_panel(
        self, name: str, epochs: int, total: int, done: int, history: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> Iterator[None]:
        """Shows a panel in its block, on a terminal, and elsewhere counts the steps of long epochs.

        history: reads the log's lines of earlier epochs.
        """
        if self.quiet or not total:  # of a run without training
            yield
            return
        if not is_terminal(self.console):
            with progress_bar("step", total) as update:
                update(done, resumed=True)
                self._count = lambda step: update(step, _epoch(step, epochs, total))
                try:
                    yield
                finally:
                    self._count = _nothing
            return
        panel = self._panel = TrainingPanel(name, epochs, total, done)
        self._count = panel.advance
        for line in history():
            panel.add_accuracies(line)
        live = Live(
            panel, console=self.console, refresh_per_second=REFRESH_PER_SECOND, redirect_stdout=stdout_is_terminal()
        )
        try:
            with redirect_progress(panel.set_status), live_display(live):
                try:
                    yield
                finally:
                    panel.stop()
        finally:
            self._panel, self._count = None, _nothing

    def advance(self, step: int) -> None:
        """Counts a step that has no line in the log."""
        self._count(step)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        if self._panel is not None:
            self._panel.step(step, line)
        else:
            self._count(step)

    def start(self, line: Mapping[str, Any]) -> None:
        """Shows the accuracies of the weights that training starts from."""
        if self._panel is not None:
            self._panel.add_accuracies(line)
            return
        accuracies = [f"{name.replace('_', ' ')} {line[name]:.2f} %" for name in _ACCURACIES if name in line]
        if accuracies:
            self.print("   ".join(["start    ", *accuracies]))

    def epoch(self, line: Mapping[str, Any]) -> None:
        if self._panel is not None:
            self._panel.epoch(line)
            return
        words = [f"epoch {line['epoch'] + 1:3d}", f"loss {line['loss']:.3f}"]
        purity = line.get("purity_unconstrained", math.nan)
        if not math.isnan(purity):  # there is a bank, and classes are known
            chosen = f", {line['purity_constrained']:.2f} in C" if "purity_constrained" in line else ""
            words.append(f"purity {purity:.2f} in M{chosen}")
        if "rank_median" in line:
            words.append(f"median rank {line['rank_median']:.0f}")
        if "pseudo_share" in line:
            words.append(f"pseudo-labels {_format_pseudo_labels(line)}")
        words += [f"{name.replace('_', ' ')} {line[name]:.2f} %" for name in _ACCURACIES if name in line]
        if "classifier_groups" in line:
            words[-1] += f" of {line['classifier_groups']} groups"
        self.print("   ".join(words))
