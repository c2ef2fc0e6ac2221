"""CMSF beside its baselines, with the same network, loop, images and number of forward passes through the network.

    python bench/baselines.py --data DATA --out docs/results/baselines

Two comparisons: with labels that are clean or noisy (the embedded sample) or coarse (Tiny-ImageNet), and without labels
(CIFAR-10). DATA is where the prepared data sets are (fashion-mnist, cifar10.npz, tiny-imagenet-64, flowers102-64,
caltech101-64). Every method gets the same three learning rates to
choose from, on images and a seed that are not reported. Every cell is one JSON file, written when it is done; a cell
that is there is not computed again, so the script may be stopped at any time, and several processes may share the work.
Each computes with one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import subsets
import torch
from cells import compute_all, read

import cmsf
from cmsf.utils.files import write_text

EPOCHS, SEEDS, CHOOSING_SEED = 8, (1, 2, 3), 0
LRS = (0.05, 0.1, 0.2)
WITH_LABELS = {
    "Xent": "xent",
    "SupCon": "supcon",
    "ProtoNW": "proto-nw",
    "CMSF top-all": "cmsf-sup-all",
    "CMSF top-10": "cmsf-sup",
}
WITHOUT = {
    "CMSF-self": "cmsf-self",
    "MSF": "msf",
    "BYOL-asym": "byol",
    "NNCLR": "nnclr",
    "MoCo v2": "moco-v2",
    "SimCLR": "simclr",
}
PASSES = dict.fromkeys((*WITH_LABELS.values(), *WITHOUT.values()), 2) | {"xent": 1}
"""Forward passes of an image in an epoch; SimCLR and NNCLR also go back through both, the others through one."""
NOISY, COARSE, NONE = ("clean", "noise-25", "noise-50"), "coarse", "without"
TRIALS = 30
LOGGED = (
    "loss",
    "purity_unconstrained",
    "purity_constrained",
    "rank_median",
    "spread",
    "images_per_second",
    "classifier",
)


@dataclass(frozen=True)
class Cell:
    """A method (by its recipe) on a task; with a learning rate, one of the trials that choose it."""

    method: str
    task: str
    seed: int
    lr: float | None = None

    @property
    def name(self) -> str:
        return f"choose-{self.method}-lr-{self.lr}" if self.lr else f"{self.task}-{self.method}-seed-{self.seed}"

    @property
    def recipe(self) -> str:
        variant = "" if self.task in ("clean", NONE) else f"+{self.task}"
        return f"{self.method}{variant}-small"


def trial(method: str, lr: float) -> Cell:
    return Cell(method, "clean" if method in WITH_LABELS.values() else NONE, CHOOSING_SEED, lr)


def cells() -> Iterator[Cell]:
    for lr in LRS:
        yield from (trial(method, lr) for method in (*WITH_LABELS.values(), *WITHOUT.values()))
    for seed in SEEDS:
        for task in (*NOISY, COARSE):
            yield from (Cell(method, task, seed) for method in WITH_LABELS.values())
        yield from (Cell(method, NONE, seed) for method in WITHOUT.values())


def chosen_lr(out: Path, method: str) -> float | None:
    """The one with the best 20-NN on images that are not reported; None while a trial is missing."""
    tried = {lr: read(out, trial(method, lr).name) for lr in LRS}
    known = {lr: found["knn"]["20-nn"] for lr, found in tried.items() if found is not None}
    return max(known, key=lambda lr: known[lr]) if len(known) == len(LRS) else None


def compute(cell: Cell, data: Path, out: Path, runs: Path) -> dict[str, Any]:
    settings = {"lr": cell.lr or chosen_lr(out, cell.method), "epochs": 2 * EPOCHS // PASSES[cell.method]}
    settings |= {"seed": cell.seed, "evaluate_every": 0}
    choosing = cell.lr is not None
    if cell.task == COARSE:
        source, settings["size"] = subsets.tiny(data, runs), 32
    elif cell.task == NONE:
        source = subsets.cifar(data, runs, choosing)
    else:
        source = subsets.fashion(data, runs) if choosing else None
    run = cmsf.train(cell.recipe, source, runs / cell.name, quiet=True, **settings)
    found = {"cell": asdict(cell), "recipe": cell.recipe, "settings": settings, "by epoch": by_epoch(run)}
    found["knn"] = run.evaluate("knn")
    if not choosing:
        found["linear"] = run.evaluate("linear")
    if cell.method == "xent":
        found["classifier"] = run.evaluate("classifier")
    if not choosing and cell.task != NONE:
        found["transfer"] = run.evaluate("transfer", suite=_suite(data, runs), trials=TRIALS, workers=1)
    return found


def by_epoch(run: cmsf.Run) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    return [{name: line.get(name) for name in LOGGED} for line in lines if line["kind"] == "epoch"]


def _suite(data: Path, runs: Path) -> Path:
    file = runs / "suite.yaml"
    if not file.exists():
        places = {name: str((data / f"{name}-64").resolve()) for name in ("flowers102", "caltech101")}
        write_text(file, "".join(f"{name}: {place}\n" for name, place in places.items()))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/baselines"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(
        cells(),
        given.out,
        given.runs,
        lambda cell: compute(cell, given.data, given.out, given.runs),
        lambda cell: cell.lr is not None or chosen_lr(given.out, cell.method) is not None,
    )


if __name__ == "__main__":
    main()
