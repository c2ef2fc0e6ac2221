"""How many images a second are trained on, beside lightly: ratios from one run on one machine.

    python bench/training.py --net small-32 --out docs/results/bench/training-small-32.json

A step of BYOL, with BYOL's views at 32 px and the paper's of photos. cmsf's `byol` is asymmetric: one view goes
through the online network and back, the other through the target. lightly is measured as its examples have it, BYOL and
NNCLR, both symmetric: both views through the networks and back, so twice the passes an image; and with its BYOL made
asymmetric, which is even. Each has its best number of threads in the main process, of one and all cores where images
are small; two workers decode for lightly, and for cmsf where images are files. "Model alone" is cmsf's step with views
that are there beforehand: no data pipeline can be faster. bf16 is what `--precision auto` picks on processors that have
instructions for it; lightly computes in fp32, as its examples do.

Contestants take turns in every round; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ours
import peers
import torch
from pictures import small_pictures, write_photos
from reporting import Target, announce, describe_run, write
from rich.console import Console
from rounds import Result, take_turns
from setting import PHOTOS, SMALL, Batches, Contestant, Network, Setting, resized
from torch import Tensor

from cmsf.data.images import FileImages
from cmsf.models.precision import pick_precision

PACKAGES = ("cmsf", "torch", "torchvision", "lightly", "pillow", "numpy")
PHOTO_COUNT = 600


@dataclass(frozen=True)
class Race:
    """A network and its images, and what is wanted: times lightly's speed, and the share of the model's own limit."""

    network: Network
    setting: Setting
    symmetric: float
    asymmetric: float
    of_limit: float
    files: bool = False
    seconds: float = 6.0
    warm_up: int = 6


RACES = {
    "small-32": Race(Network("small-residual"), SMALL, 3, 1.5, 0.85),
    "resnet18-32": Race(Network("resnet18", "small"), resized(SMALL, 32, 64), 1.25, 1.25, 0.85, warm_up=2),
    "resnet18-128": Race(Network("resnet18"), resized(PHOTOS, 128, 64), 1.5, 1.5, 0.9, files=True, warm_up=2),
    "resnet50-224": Race(
        Network("resnet50"), resized(PHOTOS, 224, 16), 1.15, 1.15, 0.9, files=True, seconds=12, warm_up=1
    ),
}
CMSF, ALONE, BYOL, ASYMMETRIC, NNCLR = (
    "cmsf",
    "cmsf, model alone",
    "lightly BYOL",
    "lightly BYOL, asymmetric",
    "lightly NNCLR",
)


def contestants(race: Race, pictures: Tensor | list[Path], precision: str) -> list[Contestant]:
    network, setting = race.network, race.setting
    mine = (
        pictures if isinstance(pictures, Tensor) else FileImages(pictures[0].parent, [path.name for path in pictures])
    )
    recipe = ours.cmsf_recipe(mine, setting, network)

    def byol(symmetric: bool) -> Batches:
        return peers.lightly_byol_steps(pictures, setting, *ours.cmsf_backbone(recipe), recipe, symmetric)

    def nnclr() -> Batches:
        return peers.lightly_nnclr_steps(pictures, setting, *ours.cmsf_backbone(recipe), recipe)

    found = []
    for name in dict.fromkeys(("fp32", precision)):
        found += [
            Contestant(f"{CMSF}, {name}", partial(ours.cmsf_steps, mine, setting, network, name)),
            Contestant(f"{ALONE}, {name}", partial(ours.cmsf_steps, mine, setting, network, name, prepared=True)),
        ]
    examples = {BYOL: partial(byol, True), ASYMMETRIC: partial(byol, False), NNCLR: nnclr}
    found += [Contestant(name, start) for name, start in examples.items()]
    if race.setting.views[0].size == 32:  # where two workers and two threads are in each other's way
        found += [Contestant(f"{name}, 1 thread", start, 1) for name, start in examples.items()]
    return found


def targets(race: Race, results: dict[str, Result], precision: str) -> list[Target]:
    def fastest(name: str) -> Result:
        ways = [results[name], *([results[f"{name}, 1 thread"]] if f"{name}, 1 thread" in results else [])]
        return max(ways, key=lambda result: result.median)

    goals = {BYOL: race.symmetric, NNCLR: race.symmetric, ASYMMETRIC: race.asymmetric}
    found = []
    for name in dict.fromkeys(("fp32", precision)):
        mine = results[f"{CMSF}, {name}"]
        found += [
            Target(f"cmsf in {name}", mine.times(fastest(peer)), goals[peer], f"times {peer} in fp32") for peer in goals
        ]
        limit = results[f"{ALONE}, {name}"]
        found.append(Target(f"cmsf in {name}", mine.times(limit), race.of_limit, "of the model alone"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=RACES, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cifar", type=Path, help="an .npz with x_train (n, 32, 32, 3) uint8; else made-up images")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    race, threads = RACES[given.net], os.cpu_count() or 1
    precision = pick_precision(torch.device("cpu"))[0]
    report: dict[str, Any] = describe_run(PACKAGES) | {"threads": threads, "batch": race.setting.batch}
    announce(Console(highlight=False), report["machine"], threads)
    with ExitStack() as stack:
        pictures: Tensor | list[Path]
        if race.files:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pictures = write_photos(folder, PHOTO_COUNT)
        else:
            pictures = small_pictures(given.cifar)
        entered = contestants(race, pictures, precision)
        results = take_turns(entered, given.rounds, race.seconds, threads, race.warm_up)
    found = targets(race, {result.name: result for result in results}, precision)
    for result in results:
        print(f"{result.name}: {result.median:,.1f} images a second", flush=True)
    for target in found:
        print(target, flush=True)
    speeds = {result.name: [round(speed, 2) for speed in result.rounds] for result in results}
    write(report | {"images per second": speeds, "targets": [target.record() for target in found]}, given.out)


if __name__ == "__main__":
    main()
