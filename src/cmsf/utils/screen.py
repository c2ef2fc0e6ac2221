"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cmsf.utils.numbers import is_number
from cmsf.utils.progress import RIGHT_MARGIN, TimeLeft, console_above, is_terminal, live_display, redirect_progress
from cmsf.utils.text import format_duration, one_line

JUDGED = ("1-nn", "20-nn", "classifier")
"""What an epoch's line may say of the network, in per cent."""
_WIDEST = 76
"""Columns. A frame that is narrower than most windows is not torn when one of them is made narrower."""
_REMEMBERED = 16
_LARGEST = 1e9
_HEIGHTS = "▁▂▃▄▅▆▇█"


class TrainingPanel:
    """Told of every step, and of the log's lines as the log is; drawn by another thread, whenever that likes."""

    def __init__(
        self, name: str, epochs: int, total: int, done: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.epochs = name, epochs
        self.time = TimeLeft(total, done, now)
        self._line: Mapping[str, Any] = {}
        self._epoch: Mapping[str, Any] = {}
        self._judged: dict[str, deque[float]] = {name: deque(maxlen=_REMEMBERED) for name in JUDGED}
        self._doing = ""

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """What epochs before this start have come to, out of a file that may say anything."""
        for line in lines:
            self._judge(line)

    def reach(self, step: int) -> None:
        self.time.at(step)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        self.reach(step)
        self._line = dict(line)

    def epoch(self, line: Mapping[str, Any]) -> None:
        self._epoch = dict(line)
        self._judge(line)

    def _judge(self, line: Mapping[str, Any]) -> None:
        for name, values in self._judged.items():
            if _is_number(line.get(name)):
                values.append(float(line[name]))

    def tell(self, doing: str) -> None:
        self._doing = doing

    def end(self) -> None:
        """The last frame, which stays."""
        self._doing = ""
        self.time.end()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        done, total = self.time.done, self.time.total or 1
        for name, value in self._rows(done, total, options.ascii_only):
            rows.add_row(name, value)
        width = max(1, min(options.max_width - RIGHT_MARGIN, _WIDEST))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total, done, max(1, width - 4 - len(" 100 %"))), f"{done / total:4.0%}".replace("%", " %")
        )
        yield Panel(Group(bar, rows), title=Text(self.name, "bold"), title_align="left", width=width)

    def _rows(self, step: int, total: int, plain: bool) -> list[tuple[str, Text]]:
        """Names and values; plain: on a terminal without letters for arrows and curves."""
        left, doing = self.time.left, self._doing
        epoch = max(0, step - 1) * self.epochs // total + 1  # an epoch's last step is its own, while it is judged
        rows = [
            ("step", Text(f"{step:,} of {total:,}, epoch {epoch} of {self.epochs}")),
            (
                "time",
                Text(format_duration(self.time.gone) + (f", {format_duration(left)} left" if left is not None else "")),
            ),
        ]
        rows += [(name, Text(", ".join(words))) for name, words in _measures(self._line) if words]
        if "pseudo_share" in self._epoch:
            rows.append(("pseudo-labels", Text(pseudo_labels(self._epoch))))
        rows += [(name, _judgement(list(values), plain)) for name, values in self._judged.items() if values]
        return [*rows, ("now", Text(doing))] if doing else rows


def _measures(line: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    terms = [name for name in line if name.startswith("loss_")]
    losses = _written(line, "loss", "{:.4f}") + [
        f"{name.removeprefix('loss_')} {value}" for name in terms for value in _written(line, name, "{:.4f}")
    ]
    return [
        ("speed", _written(line, "images_per_second", "{:,.1f} images/s")),
        ("loss", losses),
        (
            "purity",
            _written(line, "purity_unconstrained", "{:.3f} in M") + _written(line, "purity_constrained", "{:.3f} in C"),
        ),
        ("median rank", _written(line, "rank_median", "{:,g}")),
        (
            "embeddings",
            _written(line, "spread", "spread {:.3f}") + _written(line, "effective_rank", "effective rank {:.1f}"),
        ),
    ]


def _written(line: Mapping[str, Any], name: str, how: str) -> list[str]:
    return [how.format(line[name])] if _is_number(line.get(name)) else []


def _judgement(values: Sequence[float], plain: bool) -> Text:
    """The last value, how it differs from the one before, and the way there."""
    said = Text(f"{values[-1]:.2f} %")
    if len(values) > 1:
        change = round(values[-1] - values[-2], 2)
        arrow = "" if plain else "↑ " if change > 0 else "↓ " if change < 0 else "→ "
        said.append(f"  {arrow}{change:+.2f}", "green" if change > 0 else "red" if change < 0 else "")
        said.append("" if plain else f"  {curve(values)}")
    return said


def curve(values: Sequence[float]) -> str:
    """A letter a value, as high as it is between the least and the greatest."""
    least, most = min(values), max(values)
    if least == most:
        return _HEIGHTS[0] * len(values)
    return "".join(_HEIGHTS[round((value - least) / (most - least) * (len(_HEIGHTS) - 1))] for value in values)


def pseudo_labels(line: Mapping[str, Any]) -> str:
    right = line["pseudo_accuracy_confident"]
    judged = f", {100 * right:.0f} % of them right" if right == right else ""  # not NaN: there are some, and the truth
    return f"{100 * line['pseudo_share']:.1f} %{judged}"


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) <= _LARGEST


class Screen:
    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._panel: TrainingPanel | None = None

    def print(self, text: str) -> None:
        if not self.quiet:
            console_above(self.console).print(one_line(text), markup=False, emoji=False, soft_wrap=True)

    def bars(self) -> AbstractContextManager[None]:
        """What is done in here has bars, unless the screen is quiet."""
        return redirect_progress() if self.quiet else nullcontext()

    @contextmanager
    def progress(
        self, name: str, epochs: int, total: int, done: int, before: Callable[[], Iterable[Mapping[str, Any]]]
    ) -> Iterator[None]:
        """While it is entered, a panel on a terminal; before: the lines of epochs that are over."""
        if self.quiet or not is_terminal(self.console):
            yield
            return
        panel = self._panel = TrainingPanel(name, epochs, total, done)
        panel.remember(before())
        try:
            with redirect_progress(panel.tell), live_display(self.console, panel, transient=False):
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
        self.print("   ".join(words))
