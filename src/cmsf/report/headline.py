"""The first line of the page, what training has made of the starting weights, and the tiles with the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cmsf.evaluation.metrics import Estimate
from cmsf.report.contents import Stat
from cmsf.report.logged_metrics import FIGURES, LoggedMetrics
from cmsf.training.best_weights import HELD_OUT
from cmsf.training.validation import KNN, changed_figure, describe_change


def headline(logged: LoggedMetrics, epochs: int, evaluated: Estimate | None = None) -> str:
    """Returns what has become of the starting weights, in a sentence or two; empty where they were not measured.

    epochs: of the recipe; evaluated: 20-NN as cmsf evaluate has it, for the interval that the log has not.
    """
    if not epochs:
        return _untrained(logged, evaluated)
    if logged.kept and not logged.kept["epoch"]:
        return _start_was_kept(logged)
    for key in FIGURES:
        now = logged.now(key)
        if now is not None:
            break
    else:
        return ""
    if not now[0]:
        return f"{_capitalised(_at_start(logged, key))} at the start; no epoch was measured yet."
    said = _change(logged.start, now[1], key)
    if not said:  # a run of an earlier version, which did not measure its start
        return ""
    kept = f"; epoch {now[0]} of {epochs} was kept" if logged.kept else ""
    return f"{_capitalised(said)}{_why_no_knn(key)}{kept}."


def _untrained(logged: LoggedMetrics, evaluated: Estimate | None) -> str:
    if KNN not in logged.start:
        return f"The starting weights, no training{_why_no_knn('')}." if logged.start else ""
    found, interval = f"{logged.start[KNN]:.2f}", ""
    if evaluated is not None and f"{evaluated.value:.2f}" == found:  # or else it is of other images
        interval = f" (95 % interval {evaluated.low:.2f} to {evaluated.high:.2f})"
    return f"{FIGURES[KNN]} {found} %{interval} of the starting weights, no training."


def _start_was_kept(logged: LoggedMetrics) -> str:
    """Returns the figures of the start and of the best other epoch, by what epochs were judged by."""
    measured = [key for key in (*FIGURES.keys() - {KNN}, KNN) if key in logged.start]
    others = [each for key in measured[:1] for each in logged.measured(key) if each[0]]
    if not others:
        figures = ", ".join(_at_start(logged, key) for key in measured)
        return "The starting weights were kept: no epoch was clearly better" + (f"; {figures}." if figures else ".")
    epochs, best = max(others, key=lambda each: each[1][measured[0]])
    changes = "; ".join(filter(None, (_change(logged.start, best, key) for key in measured)))
    return (
        "The starting weights were kept: no epoch was clearly better. "
        f"The best other, epoch {epochs}: {changes}{'' if KNN in measured else _why_no_knn(measured[0])}."
    )


def _change(start: Mapping[str, Any], line: Mapping[str, Any], key: str) -> str:
    """Returns a figure at the start and now, and for k-NN the interval of the change and what it says."""
    try:
        if key == changed_figure(line) or key == KNN:
            return describe_change(line)
    except KeyError:  # a log without the interval
        pass
    return f"{FIGURES[key]} {start[key]:.2f} → {line[key]:.2f} %" if key in start and key in line else ""


def _at_start(logged: LoggedMetrics, key: str) -> str:
    return f"{FIGURES[key]} {logged.start[key]:.2f} %"


def _why_no_knn(key: str) -> str:
    """Returns why a figure takes the place of k-NN."""
    if key == KNN:
        return ""
    return f", no {'labelled test images' if key == HELD_OUT else 'labels'} to measure k-NN by"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def figure_tiles(logged: LoggedMetrics, epochs: int, votes: int) -> list[Stat]:
    """Returns the figures of the weights that the run has, with those before.

    epochs: of the recipe; votes: the training images whose true labels k-NN voted with, where training had others.
    """
    tiles = []
    for key, name in FIGURES.items():
        now = logged.now(key)
        if now is None:
            continue
        note = _whose(now[0], epochs, bool(logged.kept)) + _beside(logged, key, now[0])
        if votes and key == KNN:
            note += f"; votes: the true labels of all {votes:,} training images, not those training had"
        tiles.append(Stat(name, f"{now[1][key]:.2f} %", note))
    return tiles


def _whose(over: int, epochs: int, kept: bool) -> str:
    """Returns which weights a figure is of; over: how many epochs were over."""
    if over:
        return f"after epoch {over}" + (f" of {epochs}, which was kept" if kept else "")
    return "of the starting weights" + (", which were kept" if kept else "")


def _beside(logged: LoggedMetrics, key: str, over: int) -> str:
    """Returns what to compare a figure with: the first one, or the last where the first was kept."""
    others = [each for each in logged.measured(key) if each[0] != over]
    if not others:
        return ""
    epochs, line = others[0] if over else others[-1]
    return f"; {line[key]:.2f} % " + (f"after epoch {epochs}" if epochs else "at the start")
