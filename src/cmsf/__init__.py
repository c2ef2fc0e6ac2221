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
    from cmsf.api import finetune, load, resume, train
    from cmsf.bank import EmbeddingCache, MemoryBank
    from cmsf.classifier import Classifier
    from cmsf.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
    from cmsf.errors import BadInput
    from cmsf.neighbours import Neighbours
    from cmsf.objectives import constrained_mean_shift
    from cmsf.recipe import Recipe
    from cmsf.rows import UNKNOWN, Rows
    from cmsf.run import Run

__version__ = "0.1.0"

_HOMES = {
    "cmsf.api": ("finetune", "load", "resume", "train"),
    "cmsf.classifier": ("Classifier",),
    "cmsf.run": ("Run",),
    "cmsf.bank": ("EmbeddingCache", "MemoryBank"),
    "cmsf.constraints": ("Constraint", "NearCompanion", "SameLabel", "Unconstrained"),
    "cmsf.errors": ("BadInput",),
    "cmsf.neighbours": ("Neighbours",),
    "cmsf.objectives": ("constrained_mean_shift",),
    "cmsf.recipe": ("Recipe",),
    "cmsf.rows": ("UNKNOWN", "Rows"),
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
    "constrained_mean_shift",
    "finetune",
    "load",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import on first use: `cmsf --help` should not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'cmsf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
