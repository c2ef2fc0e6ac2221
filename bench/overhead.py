"""What the search and the bank cost of a training step at the paper's setting, and where the rest of it goes.

    python bench/overhead.py --out docs/results/bench/overhead.json

ResNet-50, 224 px, a bank of 128,000 rows of 512, batches of 64, all cores, fp32. The views are there beforehand: in
training, worker processes make them beside the step. The bank is full, and every image has a companion. The limit is
the matrix product that an exact search cannot avoid: 0.4 % of the operations of the passes through the network, once
for msf and twice for cmsf-self. A difference between two runs would drown in noise, so every part of a step is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from reporting import Target, measure_from_command_line
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.data.transforms import WholeBatch
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.method.losses import FIRST, SECOND
from cmsf.method.rows import Rows
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.utils.constants import UNKNOWN

IMAGES, BANK, BATCH, SIZE, DIM = 140_000, 128_000, 64, 224, 512
GOALS = {"msf": 0.005, "cmsf-self": 0.01}
PAPER = {"msf": 0.007, "cmsf-self": 0.021}
SEARCH = ("enqueue", "search", "companions")
STEP = "the whole step"


def paper_learner(method: str) -> Learner:
    numbers = {"bank_size": BANK, "batch_size": BATCH, "size": SIZE, "projection_hidden": 4096, "projection_dim": DIM}
    numbers |= {"prediction_hidden": 4096, "support_classes": 0, "support_images": 0, "extra_size": 96}
    numbers |= {"weak_crop": 0.2, "strong_crop": 0.2, "warmup_epochs": 0}
    recipe = replace(get_recipe(f"{method}-imagenet", small_images=False), cache="off")
    learner = make_learner(
        ResolvedRecipe(**(vars(recipe.filled(ResolvedRecipe.usual())) | numbers)), torch.full((IMAGES,), UNKNOWN), "cpu"
    )
    views = [torch.randn(BATCH, 3, SIZE, SIZE).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    learner.views = {FIRST: lambda *_: views[0], SECOND: lambda *_: views[1]}  # type: ignore[dict-item]
    for index in torch.arange(BANK).split(4000):
        companion = unit_vectors(len(index)) if learner.bank.companion is not None else None
        learner.bank.enqueue(Rows(unit_vectors(len(index)), index, None, companion))
    cache = learner.supervision.companion_cache
    if cache is not None:
        for part in cache.embedding.split(4000):
            part.copy_(unit_vectors(len(part)))
    return learner


def unit_vectors(count: int) -> Tensor:
    return normalize(torch.randn(count, DIM), dim=1)


def time_parts(learner: Learner) -> dict[str, list[float]]:
    """Replaces the parts of a step by themselves with a stopwatch; returns the seconds of their calls."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = function(*given, **named)
            spent[name].append(time.perf_counter() - start)
            return found

        return call

    encoders, bank = learner.encoders, learner.bank
    parts = (
        (encoders, "embed", "target, forward"),
        (encoders, "encode", "online, forward"),
        (encoders, "update_ema", "moving average"),
        (learner, "optimizer_step", "backward and optimiser"),
        (bank, "enqueue", "enqueue"),
        (bank, "search", "search"),
        (learner, "_make_rows", "companions"),
        (learner, "step", STEP),
    )
    for owner, method, name in parts:
        setattr(owner, method, timed(name, getattr(owner, method)))
    return spent


def seconds_by_part(method: str, rounds: int) -> dict[str, float]:
    """Returns the median seconds of each part in a step."""
    torch.manual_seed(0)
    learner = paper_learner(method)
    spent, totals = time_parts(learner), defaultdict(list)
    for turn in range(rounds + 1):
        spent.clear()
        index = torch.arange(turn * BATCH, (turn + 1) * BATCH) + BANK
        learner.step(WholeBatch(index, 0, 1, torch.empty(BATCH, 3, 1, 1, dtype=torch.uint8)), 0.99)
        if turn:  # the first one warms up
            for name, times in spent.items():
                totals[name].append(sum(times))
    median = {name: statistics.median(times) for name, times in totals.items()}
    median["the rest"] = median[STEP] - sum(seconds for name, seconds in median.items() if name != STEP)
    return median


def measure(rounds: int) -> dict[str, Any]:
    found = {method: seconds_by_part(method, rounds) for method in GOALS}
    targets = [
        Target(
            f"{method}: search and bank, where the paper has {100 * PAPER[method]:g} %",
            100 * sum(found[method][name] for name in SEARCH) / found[method][STEP],
            100 * goal,
            "% of a step",
            at_most=True,
        )
        for method, goal in GOALS.items()
    ]
    shares = {
        method: {name: round(100 * seconds / parts[STEP], 3) for name, seconds in parts.items()}
        for method, parts in found.items()
    }
    return {"seconds": found, "per cent of a step": shares, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
