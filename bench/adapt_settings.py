"""Which of the settings of the scale `adapt` matter: one changed at a time, on the set that chooses.

    python bench/adapt_settings.py --data DATA --weights WEIGHTS --out docs/results/adapt-settings

EfficientNet-Lite0 with ImageNet's labels, clothing-128 at 96 px, seed 100, one thread. Nothing of this set is reported.
WEIGHTS as in bench/adapt.py. A cell is a JSON file; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from adapt import FILES, LITE0
from cells import compute_all

import cmsf

DATA, SIZE, SEED = "clothing-128", 96, 100
PAPER_CROPS = {"weak_crop": 0.2, "strong_crop": 0.2}
RANDOM = {  # what a network without --init is trained with
    **PAPER_CROPS,
    "optimiser": "sgd",
    "lr": 0.05,
    "layer_decay": 1.0,
    "weight_decay": 1e-4,
    "clip_grad": 0.0,
    "freeze_epochs": 0,
    "batch_norm": "sync",
    "target_momentum": 0.99,
    "target_momentum_end": 0.99,
}
CHANGES: dict[str, dict[str, Any]] = {
    "as-it-is": {},
    "statistics-of-crops": {"batch_norm": "sync"},
    "crops-of-the-paper": PAPER_CROPS,
    "backbone-at-once": {"freeze_epochs": 0},
    "one-rate-for-all-layers": {"layer_decay": 1.0},
    "rate-1e-3": {"lr": 1e-3},
    "rate-1e-4": {"lr": 1e-4},
    "linear-projector": {"projection_layers": 1},
    "fast-target": {"target_momentum": 0.99, "target_momentum_end": 0.99},
    "colours-kept": {"jitter": 0.0, "greyscale": 0.0},
    "sgd": {"optimiser": "sgd", "lr": 0.05, "weight_decay": 1e-4},
    "as-from-nothing": RANDOM,
    "statistics-alone": {**RANDOM, "lr": 1e-9, "weight_decay": 0.0, "epochs": 2},
}


@dataclass(frozen=True)
class Cell:
    method: str
    change: str

    @property
    def name(self) -> str:
        return f"{self.method}-{self.change}"


def compute(cell: Cell, data: Path, weights: Path, runs: Path) -> dict[str, Any]:
    settings = {"init": weights / FILES[LITE0], "backbone": LITE0, "init_by_order": True, "size": SIZE, "seed": SEED}
    settings |= {"keep": "last"} | CHANGES[cell.change]  # so that the last epoch is what is judged
    run = cmsf.train(f"{cell.method}-adapt", data / DATA, runs / cell.name, quiet=True, **settings)
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    found: dict[str, Any] = {"cell": asdict(cell), "recipe": asdict(run.recipe) | {"init": FILES[LITE0]}}
    found["by epoch"] = [line for line in lines if line["kind"] in ("start", "epoch")]
    found["after"] = run.evaluate("knn") | run.evaluate("linear")
    shutil.rmtree(run.path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/adapt-settings"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells = [Cell(method, change) for method in ("cmsf-self", "cmsf-sup") for change in CHANGES]
    compute_all(
        cells, given.out, given.runs, lambda cell: compute(cell, given.data, given.weights, given.runs), lambda _: True
    )


if __name__ == "__main__":
    main()
