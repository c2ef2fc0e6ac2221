"""Representation learning by constrained mean shift.

    run = cmsf.train("cmsf-self", data="photos/", out="runs/photos")
    run.evaluate("knn")
    backbone = cmsf.load("runs/photos")
    classifier = cmsf.finetune("runs/photos", labels="few.csv")

The whole method is one function, `cmsf.constrained_mean_shift`; its parts work inside any training loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cmsf.api import finetune, from_weights, load, resume, train
    from cmsf.data.transforms import clean_view
    from cmsf.method.bank import EmbeddingCache, MemoryBank
    from cmsf.method.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
    from cmsf.method.losses import constrained_mean_shift
    from cmsf.method.rows import Rows
    from cmsf.method.search import Neighbours
    from cmsf.recipes.recipe import Recipe
    from cmsf.runs.classifier import Classifier
    from cmsf.runs.run import Run
    from cmsf.utils.constants import UNKNOWN
    from cmsf.utils.errors import BadInput

__version__ = "0.1.0"

_HOMES = {
    "cmsf.api": ("finetune", "from_weights", "load", "resume", "train"),
    "cmsf.data.transforms": ("clean_view",),
    "cmsf.runs.classifier": ("Classifier",),
    "cmsf.runs.run": ("Run",),
    "cmsf.method.bank": ("EmbeddingCache", "MemoryBank"),
    "cmsf.method.constraints": ("Constraint", "NearCompanion", "SameLabel", "Unconstrained"),
    "cmsf.utils.errors": ("BadInput",),
    "cmsf.method.search": ("Neighbours",),
    "cmsf.method.losses": ("constrained_mean_shift",),
    "cmsf.recipes.recipe": ("Recipe",),
    "cmsf.method.rows": ("Rows",),
    "cmsf.utils.constants": ("UNKNOWN",),
}

__all__ = [
    "UNKNOWN",
    "BadInput",
    "Classifier",
    "Constraint",
    "EmbeddingCache",
    "MemoryBank",
    "NearCompanion",
    "Neighbours",
    "Recipe",
    "Rows",
    "Run",
    "SameLabel",
    "Unconstrained",
    "clean_view",
    "constrained_mean_shift",
    "finetune",
    "from_weights",
    "load",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports on first use: `cmsf --help` should not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'cmsf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
