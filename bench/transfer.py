"""How long the transfer protocol's search takes on a problem of the size of Oxford Pets.

    python bench/transfer.py --out docs/results/bench-transfer.json
    python bench/transfer.py --unpruned

The features are made up: 37 overlapping classes in 64 of 2,048 dimensions, through a ReLU and normalised like those of
a backbone, then standardised; the best settings reach 80 to 90 % of the validation images.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.evaluation.transfer.trial import Problem
from cmsf.evaluation.transfer.tune import tune

TRAIN, VAL, FEATURES, CLASSES = 2_940, 740, 2_048, 37
RANK = 64
OVERLAP = 0.53
"""How far classes lie apart, in deviations of their images."""


def pets_like(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    label = torch.randint(CLASSES, (TRAIN + VAL,), generator=generator)
    # Some directions carry much more than others, as a backbone's do.
    directions = normal(RANK, FEATURES) * torch.arange(1, RANK + 1)[:, None] ** -0.5
    hidden = OVERLAP * normal(CLASSES, RANK)[label] + normal(len(label), RANK)
    noise = normal(len(label), FEATURES) * directions.std() * RANK**0.5
    features = normalize((hidden @ directions + noise).relu(), dim=1)
    mean, deviation = features[:TRAIN].mean(0), features[:TRAIN].std(0, correction=0).clamp_min(1e-6)
    features = (features - mean) / deviation
    return Problem(features[:TRAIN], label[:TRAIN], features[TRAIN:], label[TRAIN:], CLASSES, per_class=True)


def main() -> None:
    chosen = _arguments()
    begun, load = datetime.now(UTC), os.getloadavg()[0]
    problem = pets_like(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        found = tune(
            problem,
            "pets-like",
            chosen.trials,
            Path(folder) / "search.journal",
            chosen.processes,
            chosen.seed,
            prune=not chosen.unpruned,
        )
        seconds = time.monotonic() - start
    report = {
        "images": {"train": TRAIN, "validation": VAL},
        "features": FEATURES,
        "classes": CLASSES,
        "processes": chosen.processes,
        "pruning": not chosen.unpruned,
        "seconds": round(seconds, 1),
        "trials": found.trials,
        "best": asdict(found.best),
        "validation mean per class": round(found.value, 2),
        "cores": os.cpu_count(),
        "load": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "torch": torch.__version__,
        # Where things lie on this machine is nobody's business.
        "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
        "begun": begun.isoformat(timespec="seconds"),
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unpruned", action="store_true", help="fit every trial to its end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
