"""Whether training from pretrained weights helps: k-NN, a linear layer and classifiers, at the start and after.

    python bench/adapt.py --data DATA --weights WEIGHTS --out docs/results/adapt [--part self few]

WEIGHTS is a folder with the files of `scripts/try_weights.py --keep WEIGHTS`: EfficientNet-Lite0 and MobileNetV2, which
ImageNet's labels have trained, and imgsim's ResNet-50, which none have. DATA holds the folders of SETS.
Every method has the scale `adapt` with its defaults and one thread. The scale was chosen on clothing-128 (bench/
adapt_settings.py); the other sets chose nothing.

self    Training without labels.
few     A few labels a class: a linear layer, and the whole network, fine-tuned from the start, from `cmsf-self` and
        from `cmsf-semi`.
noise   Labels of which a share is wrong: the features judged by true labels, and a linear layer fitted to the wrong
        ones, from the start, cross-entropy, SupCon and `cmsf-sup`.
coarse  Grocery-128's 43 groups for its 81 classes: the features judged by the classes.

A cell is a JSON file; what is there is not computed again, and several processes may share the work.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cells import compute_all

import cmsf
from cmsf.data import build_dataset, open_source
from cmsf.data.labels import Labels
from cmsf.data.sources.table import write_csv
from cmsf.recipes.recipe import Recipe

LITE0, MOBILENET, RESNET = "tf_efficientnet_lite0", "mobilenetv2_100", "resnet50"
FILES = {LITE0: f"{LITE0}.pth", MOBILENET: f"{MOBILENET}.pt", RESNET: f"{RESNET}.pth"}
BY_ORDER = (LITE0, MOBILENET)
SETS = {"flowers102-64": 64, "pets-64": 64, "grocery-128": 96}
"""The sets that are reported, and the pixels of a view."""
SEEDS, LABELS, NOISE = (1, 2, 3), (5, 1, 10), (0.5, 0.3)
START, COARSE_SET = "start", "grocery-128"
SUPERVISED = ("cmsf-sup", "xent", "supcon")
FEW = (START, "cmsf-semi", "cmsf-self")
WAYS = ("linear", "whole")
PARTS = ("self", "few", "noise", "coarse")


@dataclass(frozen=True)
class Cell:
    part: str
    network: str
    data: str
    method: str
    """A recipe without its scale, or `start`."""
    seed: int
    labels: int = 0
    """So many labels of each class; 0: all."""
    noise: float = 0.0

    @property
    def name(self) -> str:
        words = [self.part, self.network, self.data, self.method]
        words += [f"labels-{self.labels}"] if self.labels else []
        words += [f"noise-{self.noise:.0%}".rstrip("%")] if self.noise else []
        return "-".join([*words, f"seed-{self.seed}"])

    @property
    def trains(self) -> bool:
        return self.method != START and not (self.part == "few" and self.method == "cmsf-self")

    @property
    def source(self) -> str:
        """The name of the run whose network is fine-tuned, or judged."""
        if self.trains:
            return self.name
        if self.method == START:
            return f"start-{self.network}-{self.data}"
        return replace(self, part="self", labels=0).name


def cells() -> list[Cell]:
    """One seed of EfficientNet-Lite0 first, and of that what the main questions are, set by set."""
    return sorted(_all_cells(), key=_place)


def _all_cells() -> Iterator[Cell]:
    for seed in SEEDS:
        for data in SETS:
            for network in (LITE0, MOBILENET):
                yield from (Cell("self", network, data, method, seed) for method in ("cmsf-self", "msf"))
                for labels in LABELS:
                    yield from (Cell("few", network, data, method, seed, labels) for method in FEW)
            for noise in NOISE:
                yield from (Cell("noise", LITE0, data, method, seed, noise=noise) for method in (START, *SUPERVISED))
        yield from (Cell("coarse", LITE0, COARSE_SET, method, seed) for method in SUPERVISED)
    yield from (Cell("self", RESNET, data, "cmsf-self", SEEDS[0]) for data in SETS)


def _place(cell: Cell) -> tuple[int, ...]:
    main = cell.method != "msf" and cell.labels in (0, LABELS[0]) and cell.noise in (0, NOISE[0])
    return (
        cell.seed,
        (LITE0, RESNET, MOBILENET).index(cell.network),
        not main,
        list(SETS).index(cell.data),
        PARTS.index(cell.part),
    )


def compute(cell: Cell, data: Path, weights: Path, runs: Path) -> dict[str, Any]:
    labels = label_list(cell, data, runs)
    run, found = runs / cell.source, {"cell": asdict(cell)}
    if cell.trains:
        found |= train(cell, data / cell.data, weights, labels, run)
    start = starting_run(cell, data / cell.data, weights, runs)
    found[START] = judge(start)
    if cell.method != START:
        found["after"] = judge(cmsf.Run(run))
    if labels is not None:
        ways = WAYS if cell.part == "few" else WAYS[:1]
        found["classifier"] = {way: classify(cell, run, labels, way) for way in ways}
    if cell.part != "self" and cell.method != START and cell.trains:  # a few labels are tried on those of `self`
        shutil.rmtree(run)
    return found


def train(cell: Cell, source: Path, weights: Path, labels: Path | None, out: Path) -> dict[str, Any]:
    groups = {"coarse_labels": source / "classes.csv"} if cell.part == "coarse" else {}
    run = cmsf.train(
        f"{cell.method}-adapt",
        source,
        out,
        labels=labels,
        quiet=True,
        seed=cell.seed,
        **settings(cell, weights),
        **groups,
    )
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    shutil.rmtree(run.folder.checkpoints, ignore_errors=True)
    recipe = asdict(run.recipe) | {"init": FILES[cell.network]} | ({"coarse_labels": "classes.csv"} if groups else {})
    return {"recipe": recipe, "by epoch": [line for line in lines if line["kind"] in ("start", "epoch", "kept")]}


def starting_run(cell: Cell, source: Path, weights: Path, runs: Path) -> cmsf.Run:
    out = runs / f"{START}-{cell.network}-{cell.data}"
    return cmsf.from_weights(data=source, out=out, quiet=True, **settings(cell, weights))


def settings(cell: Cell, weights: Path) -> dict[str, Any]:
    return {
        "init": weights / FILES[cell.network],
        "backbone": cell.network,
        "init_by_order": cell.network in BY_ORDER,
        "size": SETS.get(cell.data, 96),
    }


def judge(run: cmsf.Run) -> dict[str, float]:
    """Returns k-NN and a linear layer, both by the true labels; those of a start are there from the second cell on."""
    return {
        name: value
        for metric in ("knn", "linear")
        for name, value in (
            run.result(metric)["figures"] if run.result_file(metric).exists() else run.evaluate(metric)
        ).items()
    }


def classify(cell: Cell, run: Path, labels: Path, way: str) -> float:
    """Returns the test accuracy of a classifier that is fitted to the given labels."""
    out = run.with_name(f"{cell.name}-{way}")
    shutil.rmtree(out, ignore_errors=True)  # of a cell that was stopped
    classifier = cmsf.finetune(run, labels=labels, out=out, tune=way, seed=cell.seed, quiet=True)
    accuracy = classifier.evaluate("classifier")["classifier"]
    shutil.rmtree(out)
    return accuracy


def label_list(cell: Cell, data: Path, runs: Path) -> Path | None:
    """Returns the labels of a cell, the same for every method; None: those of the folders."""
    if not (cell.labels or cell.noise):
        return None
    file = runs / f"{cell.data}-labels-{cell.labels}-noise-{cell.noise:g}-seed-{cell.seed}.csv"
    if not file.exists():
        recipe = Recipe(labels_per_class=cell.labels, label_noise=cell.noise, seed=cell.seed, cache="off")
        found = build_dataset(open_source(data / cell.data), recipe)
        names = Labels(found.train.label, found.label_names).to_names()
        rows = [(path, name) for path, name in zip(found.train.paths, names, strict=True) if name is not None]
        write_csv(file, ("path", "label"), rows)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(
        [cell for cell in cells() if cell.part in given.part],
        given.out,
        given.runs,
        lambda cell: compute(cell, given.data, given.weights, given.runs),
        lambda cell: (
            cell.trains or cell.method == START or (given.runs / cell.source / "backbone.safetensors").exists()
        ),
    )


if __name__ == "__main__":
    main()
