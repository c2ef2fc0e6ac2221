"""Why the order of the methods on coarse labels is what bench/baselines.py finds: too short, badly set, or wrong?

    python bench/coarse.py --data DATA --out docs/results/coarse

Three looks at 10,000 images of Tiny-ImageNet at 32 px that learn from WordNet's groups and are judged by the 200
classes: what a network can do before it has learned anything; the same comparison with four times the steps; and other
learning rates and target momenta, on other images. Cells as in bench/baselines.py, whose learning rates it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import subsets
from baselines import CHOOSING_SEED, COARSE, EPOCHS, PASSES, SEEDS, by_epoch, chosen_lr
from cells import compute_from_command_line

import cmsf

LONGER, LONGER_METHODS = 4, ("cmsf-sup", "xent")
TRIED = ((0.05, 0.95), (0.1, 0.95), (0.2, 0.95), (0.1, 0.99), (0.1, 0.8))
"""Learning rates and momenta of the target for CMSF top-10."""
SIZE = 32


@dataclass(frozen=True)
class Cell:
    look: Literal["untrained", "longer", "tried"]
    method: str
    seed: int
    lr: float | None = None
    momentum: float | None = None

    @property
    def name(self) -> str:
        if self.look == "tried":
            return f"tried-{self.method}-lr-{self.lr}-momentum-{self.momentum}"
        return f"{self.look}-{self.method}-seed-{self.seed}"


def untrained(seed: int) -> Cell:
    return Cell("untrained", "byol", seed)


def longer(method: str, seed: int) -> Cell:
    return Cell("longer", method, seed)


def tried(lr: float, momentum: float) -> Cell:
    return Cell("tried", "cmsf-sup", CHOOSING_SEED, lr, momentum)


def cells() -> Iterator[Cell]:
    yield from (longer(method, SEEDS[0]) for method in LONGER_METHODS)
    yield from map(untrained, SEEDS)
    yield from (tried(lr, momentum) for lr, momentum in TRIED)


def compute(cell: Cell, data: Path, chosen: Path, runs: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"seed": cell.seed, "evaluate_every": 0, "size": SIZE}
    if cell.look == "untrained":  # a run of any kind, to ask what it was before
        settings["epochs"] = 1
    else:
        times = LONGER if cell.look == "longer" else 1
        settings["epochs"] = times * 2 * EPOCHS // PASSES[cell.method]
        settings["lr"] = cell.lr or chosen_lr(chosen, cell.method)
    if cell.momentum is not None:
        settings |= dict.fromkeys(("target_momentum", "target_momentum_end"), cell.momentum)
    recipe = f"{cell.method}-small" if cell.look == "untrained" else f"{cell.method}+{COARSE}-small"
    images = subsets.tiny(data, runs, choosing=cell.look == "tried")
    run = cmsf.train(recipe, images, runs / cell.name, quiet=True, **settings)
    found = {"cell": asdict(cell), "recipe": recipe, "settings": settings, "by epoch": by_epoch(run)}
    if cell.look == "untrained":
        return found | {metric: run.references(metric) for metric in ("knn", "linear")}
    return found | {metric: run.evaluate(metric) for metric in ("knn", "linear")}


if __name__ == "__main__":
    compute_from_command_line(__doc__, cells(), compute, "runs/coarse")
