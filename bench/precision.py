"""Whether training in bf16 costs accuracy: cmsf-self on the embedded sample in either precision, three seeds.

    python bench/precision.py --out docs/results/precision

Both precisions of a seed on one processor, with one thread. Only one that has instructions for bf16 tells.
A cell is a JSON file; what is there is not computed again, and several processes may share the work.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cells import compute_all

import cmsf

RECIPE, EPOCHS, SEEDS, PRECISIONS = "cmsf-self-small", 12, (1, 2, 3), ("bf16", "fp32")


@dataclass(frozen=True)
class Cell:
    precision: str
    seed: int

    @property
    def name(self) -> str:
        return f"cmsf-self-{self.precision}-seed-{self.seed}"


def cells() -> Iterator[Cell]:
    yield from (Cell(precision, seed) for seed in SEEDS for precision in PRECISIONS)


def compute(cell: Cell, runs: Path) -> dict[str, Any]:
    settings = {"precision": cell.precision, "seed": cell.seed, "epochs": EPOCHS}
    run = cmsf.train(RECIPE, "fashion-mnist-sample", runs / cell.name, quiet=True, **settings)
    return {"recipe": RECIPE, **settings} | {metric: run.evaluate(metric) for metric in ("knn", "linear")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(cells(), given.out, given.runs, lambda cell: compute(cell, given.runs), lambda _: True)


if __name__ == "__main__":
    main()
