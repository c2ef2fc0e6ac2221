"""How long the transfer protocol's search takes on a problem of the size of Oxford Pets.

    python bench/transfer.py --out docs/results/bench/transfer.json

60 trials in two processes, with pruning of trials that fall behind, as `cmsf evaluate` has it, and without; once each.
The features are made up: 37 overlapping classes in 64 of 2,048 dimensions, through a ReLU and normalised like those of
a backbone, then standardised; the best settings reach 80 to 90 % of the validation images.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reporting import Target, measure_from_command_line
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.evaluation.transfer.trial import Problem
from cmsf.evaluation.transfer.tune import tune

TRAIN, VAL, FEATURES, CLASSES = 2_940, 740, 2_048, 37
RANK = 64
TRIALS, PROCESSES, SEED = 60, 2, 0
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


def search(problem: Problem, prune: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        found = tune(problem, "pets-like", TRIALS, Path(folder) / "search.journal", PROCESSES, SEED, prune=prune)
        seconds = round(time.monotonic() - start, 1)
    return {"seconds": seconds, "trials": found.trials, "best": asdict(found.best), "validation": found.value}


def measure(rounds: int) -> dict[str, Any]:
    problem = pets_like(SEED)
    pruned, whole = search(problem, True), search(problem, False)
    targets = [
        Target("time with pruning", pruned["seconds"] / whole["seconds"], 0.85, "of the time without", at_most=True),
        Target("what pruning loses", whole["validation"] - pruned["validation"], 0.5, "points", at_most=True),
    ]
    return {"with pruning": pruned, "without": whole, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
