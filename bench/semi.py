"""Few labels on the embedded sample: cmsf-semi beside what else one could do with the same labels, and its ablations.

    python bench/semi.py --out docs/results/semi --runs runs/semi

Every cell is one JSON file, written when it is done; a cell that is there is not computed again, so the script may be
stopped at any time, and several processes may share the work. Each computes with one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cells import compute_all

import cmsf
from cmsf.data import build_dataset, open_source
from cmsf.data.labels import Labels
from cmsf.data.sources.table import write_csv
from cmsf.evaluation.finetune import FineTuneSettings
from cmsf.recipes.recipe import Recipe

SEEDS, SHARES, EPOCHS = (1, 2, 3), (0.1, 0.01), 8
XENT_LR = 0.05  # on images outside of the sample as good as 0.2, with 1 % and with 10 % of the labels (docs/log.md)
LOGGED = ("pseudo_share", "pseudo_accuracy_confident", "pseudo_accuracy_all", "pseudo_cost",
          "purity_unconstrained", "purity_constrained", "rank_median", "loss", "images_per_second")  # fmt: skip


@dataclass(frozen=True)
class Pretraining:
    name: str
    recipe: str
    changes: tuple[tuple[str, Any], ...] = ()


SEMI = Pretraining("semi", "cmsf-semi")
BASIC = Pretraining("semi-basic", "cmsf-semi-basic")
MSF = Pretraining("msf", "msf")
ABLATIONS = tuple(
    Pretraining(f"semi-{name}", "cmsf-semi", ((field, value),))
    for name, field, value in (
        ("threshold-0", "pseudo_threshold", 0.0),
        ("threshold-0.7", "pseudo_threshold", 0.7),
        ("threshold-0.9", "pseudo_threshold", 0.9),
        ("offline", "pseudo_cache", "offline"),
        ("mlp-3", "pseudo_labels", "mlp-3"),
        ("linear", "pseudo_labels", "linear"),
        ("knn", "pseudo_labels", "knn"),
    )
)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tune": "whole"},
    "whole-2-rounds": {"tune": "whole", "rounds": 2},
    "head": {"tune": "head"},
    "linear": {"tune": "linear"},
}


@dataclass(frozen=True)
class Cell:
    """One figure: a pretraining, or a classifier that starts from one."""

    pretraining: Pretraining
    share: float
    seed: int
    way: str | None = None
    """How it is fine-tuned; None: the pretraining itself; `xent`: from random weights, as many passes as both."""

    @property
    def run(self) -> str:
        share = "" if self.pretraining is MSF else f"-{self.share:.0%}".replace("%", "")  # msf sees no labels
        return f"{self.pretraining.name}{share}-seed-{self.seed}"

    @property
    def name(self) -> str:
        if self.way is None:
            return self.run
        return f"{self.pretraining.name}-{self.share:.0%}-seed-{self.seed}-{self.way}".replace("%", "")


def cells() -> Iterator[Cell]:
    """All of them: the comparison, the ablations at 10 %, and second rounds for the others too."""
    for seed in SEEDS:
        for share in SHARES:
            for pretraining in (SEMI, BASIC, MSF):
                yield from (Cell(pretraining, share, seed, way) for way in (None, "whole"))
            yield Cell(SEMI, share, seed, "xent")
    for seed in SEEDS:
        yield from (Cell(SEMI, 0.1, seed, way) for way in ("whole-2-rounds", "head", "linear"))
        for pretraining in ABLATIONS:
            yield from (Cell(pretraining, 0.1, seed, way) for way in (None, "whole"))
    for seed in SEEDS:
        for share in SHARES:
            yield from (Cell(pretraining, share, seed, "whole-2-rounds") for pretraining in (SEMI, BASIC, MSF))


def compute(cell: Cell, runs: Path) -> dict[str, Any]:
    """What there is to say of a cell."""
    labels = label_list(cell, runs)
    found = pretrain(cell, runs / cell.run, labels) if cell.way is None else tune(cell, runs, labels)
    return {"cell": asdict(cell), "recipe": cell.pretraining.recipe, "epochs": EPOCHS} | found


def pretrain(cell: Cell, folder: Path, labels: Path) -> dict[str, Any]:
    about = cell.pretraining
    given = None if about is MSF else labels
    settings = dict(about.changes) | {"seed": cell.seed, "epochs": EPOCHS, "evaluate_every": 0}
    run = cmsf.train(f"{about.recipe}-small", out=folder, labels=given, quiet=True, **settings)
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    epochs = [{name: line.get(name) for name in LOGGED} for line in lines if line["kind"] == "epoch"]
    return {"figures": run.evaluate("knn"), "passes": passes(run), "by epoch": epochs}


def tune(cell: Cell, runs: Path, labels: Path) -> dict[str, Any]:
    run = cmsf.Run(runs / cell.run)
    out, count = runs / cell.name, len(labels.read_text().splitlines()) - 1
    batch, usual = FineTuneSettings().batch_and_epochs(count)
    if cell.way == "xent":
        epochs = round((passes(run) + usual * (count // batch) * batch) / ((count // batch) * batch))
        how: dict[str, Any] = {"tune": "whole", "random_weights": True, "epochs": epochs, "lr": XENT_LR}
    else:
        how = WAYS[cell.way or ""]
    if not out.exists():
        cmsf.finetune(run.path, labels=labels, out=out, seed=cell.seed, quiet=True, **how)
    return {"how": how} | {
        "classifier": json.loads((out / "classifier.json").read_text()),
        "result": json.loads((out / "results" / "classifier.json").read_text()),
    }


def passes(run: cmsf.Run) -> int:
    """Images through the network forwards, the target's and the online one's."""
    recipe, images = run.recipe, len(build_dataset(open_source(None), Recipe()).train)
    return 2 * recipe.epochs * (images // recipe.batch_size) * recipe.batch_size


def label_list(cell: Cell, runs: Path) -> Path:
    """The labels of a share and a seed, the same for every method."""
    file = runs / f"labels-{cell.share:g}-seed-{cell.seed}.csv"
    if not file.exists():
        data = build_dataset(open_source(None), Recipe(label_share=cell.share, seed=cell.seed))
        names = Labels(data.train.label, data.label_names).to_names()
        rows = [(path, name) for path, name in zip(data.train.paths, names, strict=True) if name is not None]
        write_csv(file, ("path", "label"), rows)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/semi"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    compute_all(
        cells(),
        chosen.out,
        chosen.runs,
        lambda cell: compute(cell, chosen.runs),
        lambda cell: cell.way is None or (chosen.out / f"{cell.run}.json").exists(),
    )


if __name__ == "__main__":
    main()
