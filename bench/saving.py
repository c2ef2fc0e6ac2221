"""What checkpoints cost, as a share of the time that training takes.

    python bench/saving.py --out docs/results/bench/saving.json

On the embedded sample: whole runs with and without checkpoints in turns, at the default interval (every epoch, and
every 15 minutes); the share by the clock, and by what the training thread itself spent on copying and waiting. At
ImageNet's size: the copy of everything that the paper's setting has to keep (ResNet-50 with its optimiser, a bank of
128,000 rows of 512 with companions, a cache of 1,281,167 rows in fp16), which is what training waits for, and the
write, which goes on beside it; twice in an epoch of 20 minutes: at its end, and after 15 minutes what has changed
until then.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import reporting
import torch
from jobs import Job, Timed, take_turns
from rich.console import Console

import cmsf
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.training.checkpointer import Checkpointer

MOST = 0.02
"""The share of the time that checkpoints may cost."""
IMAGENET, EPOCH_MINUTES, INTERVAL_MINUTES = 1_281_167, 20, 15
SETTINGS = {"epochs": 2, "evaluate_every": 0}


@contextmanager
def without_saving() -> Iterator[None]:
    save = Checkpointer.save
    Checkpointer.save = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpointer.save = save  # type: ignore[method-assign]


class Stopwatch:
    """How long the training thread copies, syncs the log and waits for what is being written."""

    def __init__(self) -> None:
        self.seconds, self.saves = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        plain = {name: getattr(Checkpointer, name) for name in ("save", "wait")}

        def timed(name: str) -> Any:
            def call(*given: Any, **named: Any) -> None:
                start = time.perf_counter()
                plain[name](*given, **named)
                self.seconds += time.perf_counter() - start
                self.saves += name == "save"

            return call

        for name in plain:
            setattr(Checkpointer, name, timed(name))
        try:
            yield
        finally:
            for name, method in plain.items():
                setattr(Checkpointer, name, method)


def train(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        cmsf.train("cmsf-self-small", None, Path(place) / "run", quiet=True, **SETTINGS)


def at_laptop_scale(rounds: int, folder: Path) -> dict[str, Any]:
    watch = Stopwatch()

    def with_checkpoints() -> None:
        with watch.running():
            train(folder)

    def without() -> None:
        with without_saving():
            train(folder)

    timed = take_turns([Job("with", with_checkpoints), Job("without", without)], rounds)
    both, turns = (timed["with"], timed["without"]), rounds + 1  # the first turn is not timed, but counted
    a_run, saves = watch.seconds / turns, watch.saves // turns
    return {
        "what": f"cmsf-self-small on the embedded sample, {SETTINGS['epochs']} epochs, {saves} checkpoints",
        "seconds": {one.name: [round(each, 2) for each in one.seconds] for one in both},
        "share by the clock": round(_share(*both), 4),
        "share by the clock, round by round": [
            round(mine / theirs - 1, 4) for mine, theirs in zip(both[0].seconds, both[1].seconds, strict=True)
        ],
        "seconds of the training thread, a run": round(a_run, 4),
        "share of the training thread": round(a_run / both[0].median, 5),
    }


def _share(saving: Timed, plain: Timed) -> float:
    return saving.median / plain.median - 1


def imagenet_learner() -> tuple[ResolvedRecipe, Learner]:
    """The paper's self-supervised setting as it is in the middle of training, with numbers that mean nothing."""
    numbers = {"bank_size": 128_000, "batch_size": 256, "size": 224, "projection_hidden": 4096, "projection_dim": 512}
    numbers |= {"prediction_hidden": 4096, "support_classes": 0, "support_images": 0, "extra_size": 96}
    numbers |= {"weak_crop": 0.2, "strong_crop": 0.2, "warmup_epochs": 0}
    recipe = replace(get_recipe("cmsf-self-imagenet", small_images=False), precision="bf16", cache="off")
    resolved = ResolvedRecipe(**(vars(recipe.filled(ResolvedRecipe.usual())) | numbers))
    learner = make_learner(resolved, torch.zeros(IMAGENET, dtype=torch.int64), "cpu")
    for parameter in learner.encoders.trainable_parameters():
        learner.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for rows in (learner.bank.embedding, learner.bank.companion, learner.supervision.companion_cache.embedding):
        rows.fill_(0.5)  # no pages that are not there yet
    return resolved, learner


def at_imagenet_size(folder: Path, rounds: int) -> dict[str, Any]:
    recipe, learner = imagenet_learner()
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        Checkpointer(Path(place) / "checkpoints", recipe, learner, print) as checkpointer,
    ):
        figures: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds):
            for kind, whole in (("at the end of an epoch", True), ("after 15 minutes", False)):
                share = 0.0 if whole else INTERVAL_MINUTES / EPOCH_MINUTES
                learner.supervision.companion_cache.changed[: int(share * IMAGENET)] = True
                gc.collect()
                start = time.perf_counter()
                checkpointer.save(2 * number + 1 + (not whole), lambda: {"step": 1}, full_cache=whole)
                copied = time.perf_counter()
                checkpointer.wait()
                times = {"copying": copied - start, "writing beside it": time.perf_counter() - copied}
                for name, seconds in times.items():
                    figures.setdefault(kind, {}).setdefault(name, []).append(round(seconds, 2))
        assert checkpointer.latest is not None
        size = sum(part.size for part in checkpointer.latest.parts.values())
    blocked = sum(max(kind["copying"]) for kind in figures.values())
    return {
        "what": f"{recipe.name}, bf16, {IMAGENET:,} images",
        "bytes on the disk, in mid-epoch": size,
        "seconds": figures,
        "seconds that training waits, an epoch": round(blocked, 2),
        "share of an epoch of 20 minutes": round(blocked / (60 * EPOCH_MINUTES), 5),
    }


def main() -> None:
    chosen, console = _arguments(), Console()
    about = reporting.describe_run(["torch", "cmsf"])
    reporting.announce(console, about["machine"], torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        parts, shares = {}, {}
        if chosen.part in ("all", "imagenet"):
            parts["imagenet"] = at_imagenet_size(Path(name), min(2, chosen.rounds))
            shares["ImageNet's size, of an epoch"] = parts["imagenet"]["share of an epoch of 20 minutes"]
        if chosen.part in ("all", "laptop"):
            parts["laptop"] = at_laptop_scale(chosen.rounds, Path(name))
            for kind in ("by the clock", "of the training thread"):
                shares[f"laptop, {kind}"] = parts["laptop"][f"share {kind}"]
    targets = [
        reporting.Target(f"share of the time that is left for training ({what})", 1 - share, 1 - MOST)
        for what, share in shares.items()
    ]
    about["machine"]["load after"] = round(os.getloadavg()[0], 2)
    report = about | parts | {"targets": [target.record() for target in targets]}
    for target in targets:
        console.print(
            f"{target.what} {target.reached:.4f}, wanted {target.wanted}: {'met' if target.met else 'missed'}"
        )
    if chosen.out is not None:
        reporting.write(report, chosen.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "laptop", "imagenet"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="the disk to write to (default: that of temporary files)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
