"""What k, k' and the companions' source do without labels: the paper's ablations on 10,000 images of CIFAR-10.

    python bench/ablations.py --data DATA --out docs/results/ablations

Every setting of `cmsf-self` and `msf` that differs from the recipe in one number, with the learning rate that
bench/baselines.py has chosen for the method, one seed each; the extremes have three. Cells as in bench/baselines.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import subsets
from baselines import EPOCHS, SEEDS, by_epoch, chosen_lr
from cells import compute_from_command_line

import cmsf

COMPANION_KS, KS = (5, 2, 10, 20, 50, 200), (2, 10, 20, 50)
EXTREMES = (
    ("msf", {"k": 500}),
    ("cmsf-self", {"companion_k": 200}),
    ("cmsf-self", {"companions": "third-view"}),
    ("cmsf-self", {"k": 50, "companion_k": 50}),
)


@dataclass(frozen=True)
class Cell:
    method: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        changed = "".join(f"-{name.replace('_', '-')}-{value}" for name, value in self.changes.items())
        return f"{self.method}{changed}-seed-{self.seed}"


def cells() -> Iterator[Cell]:
    """One seed of everything first, then the extremes' others."""
    first = SEEDS[0]
    yield from (Cell(method, first, changes) for method, changes in EXTREMES)
    yield from (Cell("cmsf-self", first, {"companion_k": k}) for k in COMPANION_KS if k not in (5, 200))
    yield from (Cell("msf", first, {"k": k}) for k in KS)
    yield from (Cell("cmsf-self", first, {"k": k}) for k in KS if k == 2)
    yield from (Cell(method, seed, changes) for seed in SEEDS[1:] for method, changes in EXTREMES)


def compute(cell: Cell, data: Path, chosen: Path, runs: Path) -> dict[str, Any]:
    settings = {"lr": chosen_lr(chosen, cell.method), "epochs": EPOCHS, "seed": cell.seed, "evaluate_every": 0}
    settings |= cell.changes
    recipe = f"{cell.method}-small"
    run = cmsf.train(recipe, subsets.cifar(data, runs, choosing=False), runs / cell.name, quiet=True, **settings)
    found = {"cell": asdict(cell), "recipe": recipe, "settings": settings, "by epoch": by_epoch(run)}
    return found | {metric: run.evaluate(metric) for metric in ("knn", "linear")}


if __name__ == "__main__":
    compute_from_command_line(__doc__, cells(), compute, "runs/ablations")
