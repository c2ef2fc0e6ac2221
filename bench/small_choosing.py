"""What makes a short run from nothing learn: spread, contrast, coverage, momentum, bank and neighbours, one at a time.

    python bench/small_choosing.py --data DATA --out docs/results/small-choosing [--only cmsf-nce]

10,000 images of CIFAR-10 and 5,000 to test on that no reported figure has seen, seed 0, 12 epochs: as many passes as 8
of SimCLR have, if a backward pass counts as two forward passes. One thread. A cell is a JSON file; what is there is not
computed again, and several processes may share the work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import subsets
import torch
from cells import compute_all

import cmsf

EPOCHS, SIMCLR_EPOCHS, XENT_EPOCHS, SEED, LR = 12, 8, 16, 0, 0.1
NCE = {"objective": "constrained-nce"}
UNIFORMITY = {"spread": "uniformity"}


@dataclass(frozen=True)
class Cell:
    method: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join([self.method, *(f"{name.replace('_', '-')}-{value}" for name, value in self.changes.items())])


def cells() -> Iterator[Cell]:
    """Ordered by what is learned from them: parents and the first variants, then one setting at a time."""
    for method in ("byol", "cmsf-self", "cmsf-sup"):
        yield Cell(method, NCE)
        yield Cell(method, UNIFORMITY)
    yield from (Cell(method) for method in ("simclr", "supcon", "byol", "cmsf-self", "cmsf-sup", "xent"))
    for share in (0.5, 0.9, 1.0):
        yield Cell("cmsf-self", {"companion_coverage": share})
        yield Cell("cmsf-self", {**NCE, "companion_coverage": share})
    for temperature in (0.2, 0.3, 0.05):
        yield from (Cell(method, {**NCE, "temperature": temperature}) for method in ("byol", "cmsf-sup"))
    for momentum in (0.0, 0.8, 0.99):
        changed = {"target_momentum": momentum, "target_momentum_end": momentum}
        yield from (Cell(method, {**NCE, **changed}) for method in ("byol", "cmsf-sup"))
    for bank in (1000, 4000):
        yield from (Cell(method, {**NCE, "bank_size": bank}) for method in ("cmsf-sup", "msf"))
    for kind, weight in (("uniformity", 0.25), ("uniformity", 1.0), ("koleo", 0.2), ("koleo", 0.5)):
        yield from (Cell(method, {"spread": kind, "spread_weight": weight}) for method in ("byol", "cmsf-sup"))
    for k in (1, 3, 20):
        yield Cell("cmsf-sup", {**NCE, "k": k})


def compute(cell: Cell, data: Path, runs: Path) -> dict[str, Any]:
    epochs = {"simclr": SIMCLR_EPOCHS, "nnclr": SIMCLR_EPOCHS, "xent": XENT_EPOCHS}.get(cell.method, EPOCHS)
    settings = {"lr": LR, "epochs": epochs, "seed": SEED, "evaluate_every": 0} | cell.changes
    run = cmsf.train(
        f"{cell.method}-small", subsets.cifar(data, runs, choosing=True), runs / cell.name, quiet=True, **settings
    )
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    found = {"cell": asdict(cell), "settings": settings, "by epoch": [e for e in lines if e["kind"] == "epoch"]}
    return found | {metric: run.evaluate(metric) for metric in ("knn", "linear")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/small-choosing"))
    parser.add_argument("--only", nargs="+", help="cells whose names begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [cell for cell in cells() if given.only is None or cell.name.startswith(tuple(given.only))]
    compute_all(chosen, given.out, given.runs, lambda cell: compute(cell, given.data, given.runs), lambda _: True)


if __name__ == "__main__":
    main()
