"""Collects what a run has written: log, recipe, environment, evaluations and cost. No image is read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cmsf.evaluation.metrics import Estimate
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import AUTO, Recipe, ResolvedRecipe
from cmsf.report.contents import ResultTable, RunReport, Setting, Stat
from cmsf.report.headline import figure_tiles, headline
from cmsf.report.logged_metrics import LoggedMetrics
from cmsf.report.plots import EpochLines, training_plots
from cmsf.runs.cost import RunCost, run_cost
from cmsf.runs.run import Run
from cmsf.utils.errors import BadInput
from cmsf.utils.files import read_json
from cmsf.utils.text import format_duration


def collect_history(run: Run) -> RunReport:
    """Returns the report of a run as far as its files go: all there is while it is being trained."""
    logged, notes, cost, votes = LoggedMetrics.read(run), [], None, 0
    results: dict[str, ResultTable] = {}
    for file in sorted(run.folder.results.glob("*.json")):
        try:
            results[file.stem] = _result(file)
        except BadInput as error:
            notes.append(str(error))
    epochs, evaluated = logged.epochs, results.get("knn")
    try:
        cost = run_cost(run.folder) if epochs else None
        votes = run.folder.listing().votes_beyond_labels() if epochs else 0
    except BadInput as error:
        notes.append(f"its cost cannot be computed: {error}")
    return RunReport(
        name=run.recipe.name,
        path=str(run.path),
        state=_state(run, len(epochs)),
        answer=headline(logged, run.recipe.epochs, None if evaluated is None else evaluated.figures.get("20-NN")),
        summary=(*_image_count(run, cost), *figure_tiles(logged, run.recipe.epochs, votes), *_last_epoch(epochs)),
        plots=tuple(training_plots(epochs, logged.start)),
        results=tuple(results.values()),
        compute={} if cost is None else _cost(cost),
        recipe=_settings(run.recipe),
        environment={name: _text(value) for name, value in run.folder.environment().items()},
        notes=tuple(notes),
        epochs=epochs,
        spent=cost,
    )


def _state(run: Run, epochs: int) -> str:
    if run.folder.is_complete():
        return "complete"
    reached = f"epoch {epochs} of {run.recipe.epochs}"
    return reached if run.folder.in_training() else f"stopped after {reached}"


def _image_count(run: Run, cost: RunCost | None) -> list[Stat]:
    if cost is None:
        return []
    source = run.folder.data_config().data
    name = "" if source is None else f" of {Path(source).name or source}"
    classes = f"; {cost.classes} classes" if cost.classes else ""
    note = f"{name}, and {cost.test_images:,} to test{classes}".strip(" ,")
    return [Stat("training images", f"{cost.images:,}", note)]


def _last_epoch(epochs: EpochLines) -> list[Stat]:
    """Returns the loss and the neighbours of the last epoch."""
    stats = []
    for line in epochs[-1:]:
        if isinstance(line.get("loss"), float):
            stats.append(Stat("loss", f"{line['loss']:.3f}", f"mean of epoch {line['epoch'] + 1}"))
        constrained, nearest = line.get("purity_constrained"), line.get("purity_unconstrained")
        if isinstance(constrained, float) and isinstance(nearest, float):
            note = f"of C's neighbours; M's own {100 * nearest:.0f} %"
            stats.append(Stat("purity", f"{100 * constrained:.0f} %", note))
        if isinstance(line.get("rank_median"), float):
            stats.append(Stat("median rank", f"{line['rank_median']:.0f}", "in M, of C's last neighbour"))
    return stats


def _cost(cost: RunCost) -> dict[str, str]:
    """Returns passes through the backbone, multiply-adds by the paper's equation, and time."""
    lines = {
        "epochs": f"{cost.epochs} of {cost.recipe.epochs}",
        "training images": f"{cost.images:,}",
        "forward passes": f"{cost.compute.forward_passes:,.0f}",
        "backward passes": f"{cost.compute.backward_passes:,.0f}",
        "multiply-adds, a backward pass counted as two": f"{cost.compute.flops:.3g}",
    }
    if cost.clean_views is not None:
        lines["of the offline cache beside them"] = f"{cost.clean_views.flops:.3g}"
    if cost.seconds is not None:
        lines["time of training"] = format_duration(cost.seconds)
    return lines


def _settings(recipe: ResolvedRecipe) -> tuple[Setting, ...]:
    """Returns every field, and whether it has the value of the named recipe, or one that was resolved from auto."""
    try:
        usual = asdict(get_recipe(recipe.name, small_images=True))
    except BadInput:  # somebody's own
        usual = asdict(Recipe())
    return tuple(
        Setting(name, _text(value), value == usual[name] or usual[name] == AUTO)
        for name, value in asdict(recipe).items()
        if name != "name"
    )


def _result(file: Path) -> ResultTable:
    result = read_json(file)
    try:
        figures = {
            name.replace("-nn", "-NN"): _measure(value, result["measures"][name])
            for name, value in result["figures"].items()
        }
        protocol = {str(name): _text(value) for name, value in result["protocol"].items()}
        of = f" of {result['of']}" if "of" in result else ""
        return ResultTable(f"{result['metric']}{of}", str(result["written"]), figures, protocol)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise BadInput(f"{file} is not what cmsf evaluate wrote") from None


def _measure(value: Any, report: Any) -> Estimate:
    quoted = report[report["quoted"]]
    numbers = [float(number) for number in (value, quoted["low"], quoted["high"])]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("NaN or inf")
    return Estimate(*numbers)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
