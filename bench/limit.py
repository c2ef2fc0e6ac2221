"""What would raise the limit itself: the step of the model alone, changed in one way at a time.

    python bench/limit.py --out docs/results/bench/limit.json

A step of BYOL-asym with views that are there beforehand, all cores. bf16 is what `--precision auto` picks where there
are instructions for it. The others are not in use: a fused optimiser, the target's pass in inference mode instead of
without gradient, and torch.compile of both backbones, whose compile time is in `compile seconds`. Steps take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from reporting import Target, measure_from_command_line
from torch.optim import SGD

from cmsf.method.build import make_encoders, make_loss
from cmsf.models.encoders import Encoders
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import Recipe
from cmsf.training.resolve import expected

NETWORKS = {
    "small residual net, 32 px": ("small-residual", "standard", 128),
    "ResNet-18, 32 px": ("resnet18", "small", 32),
}
SIDE, IMAGES, STEPS = 32, 10_000, 3


def step_of(
    recipe: Recipe, batch: int, fused: bool = False, inference: bool = False
) -> tuple[Encoders, Callable[[], None]]:
    torch.manual_seed(0)
    resolved = expected(recipe, IMAGES, SIDE)
    encoders = make_encoders(resolved, make_loss(resolved), 0)
    optimizer = SGD(encoders.trainable_parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)
    first, second = (torch.randn(batch, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last) for _ in range(2))

    def step() -> None:
        with torch.inference_mode(inference):
            target = encoders.embed(first).embedding
        prediction = encoders.encode(second).prediction
        loss = (2 - 2 * (prediction * target.clone()).sum(1)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        encoders.update_ema(0.99)

    return encoders, step


def measure(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    targets = []
    for name, (backbone, stem, batch) in NETWORKS.items():
        recipe = get_recipe("byol-small").changed({"backbone": backbone, "stem": stem, "size": SIDE})
        steps = {
            "as it is": step_of(recipe, batch)[1],
            "bf16": step_of(recipe.changed({"precision": "bf16"}), batch)[1],
            "fused optimiser": step_of(recipe, batch, fused=True)[1],
            "inference mode": step_of(recipe, batch, inference=True)[1],
        }
        encoders, compiled = step_of(recipe, batch)
        for encoder in (encoders.online, encoders.target):
            encoder.backbone.compile()
        start = time.perf_counter()
        try:
            compiled()
            steps["compiled"] = compiled
        except Exception as error:  # no C++ compiler, or one that fails
            found[f"{name}, compile"] = str(error).strip().splitlines()[0][:200]
        compile_seconds = round(time.perf_counter() - start, 1)
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        for turn in range(rounds + 1):
            for way, step in steps.items():
                start = time.perf_counter()
                for _ in range(STEPS):
                    step()
                if turn:
                    seconds[way].append((time.perf_counter() - start) / STEPS)
        median = {way: statistics.median(times) for way, times in seconds.items()}
        found[name] = {"seconds a step": median, "compile seconds": compile_seconds, "images a step": batch}
        targets += [
            Target(f"{name}: {way}", median["as it is"] / seconds_a_step, None, "times as fast")
            for way, seconds_a_step in median.items()
            if way != "as it is"
        ]
    return {"steps": found, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
