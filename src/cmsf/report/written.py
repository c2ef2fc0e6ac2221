"""What a run has written of itself, in words for the page: recipe, environment, evaluations."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import AUTO, Recipe, Resolved
from cmsf.report.contents import Measure, ResultTable, Setting
from cmsf.runs.folder import RunFolder
from cmsf.utils.errors import BadInput
from cmsf.utils.files import read_json


def settings(recipe: Resolved) -> tuple[Setting, ...]:
    """Every field of a recipe, and whether it is what the named recipe has, or what was worked out for these images."""
    try:
        usual = asdict(get_recipe(recipe.name, small_images=True))
    except BadInput:  # somebody's own
        usual = asdict(Recipe())
    return tuple(
        Setting(name, _words(value), value == usual[name] or usual[name] == AUTO)
        for name, value in asdict(recipe).items()
        if name != "name"
    )


def environment(folder: RunFolder) -> tuple[tuple[str, str], ...]:
    return tuple((name, _words(value)) for name, value in folder.environment().items())


def results(folder: RunFolder) -> tuple[tuple[ResultTable, ...], tuple[str, ...]]:
    """The evaluations in results/, and what there is to be said of files there that are none."""
    tables, notes = [], []
    for file in sorted(folder.results.glob("*.json")):
        try:
            tables.append(_table(file))
        except BadInput as error:
            notes.append(str(error))
    return tuple(tables), tuple(notes)


def _table(file: Path) -> ResultTable:
    found = read_json(file)
    try:
        figures = tuple(_measure(name, value, found["measures"][name]) for name, value in found["figures"].items())
        protocol = tuple((str(name), _words(value)) for name, value in found["protocol"].items())
        of = f" of {found['of']}" if "of" in found else ""
        return ResultTable(f"{found['metric']}{of}", str(found["written"]), figures, protocol)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise BadInput(f"{file} is not what cmsf evaluate wrote") from None


def _measure(name: str, value: Any, about: Any) -> Measure:
    quoted = about[about["quoted"]]
    figure, low, high = (float(one) for one in (value, quoted["low"], quoted["high"]))
    if not all(map(math.isfinite, (figure, low, high))):
        raise ValueError(name)
    return Measure(name.replace("-nn", "-NN"), figure, low, high)


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
