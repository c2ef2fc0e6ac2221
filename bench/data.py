"""How fast cmsf makes views, beside lightly, kornia and torchvision: ratios from one run on one machine.

    pip install -r bench/requirements.txt
    python bench/data.py --part all --rounds 5 --seconds 6 --cifar cifar10.npz

A  Two views of CIFAR-10 at 32 px: BYOL's views with lightly's probabilities, batches of 256. lightly and torchvision
   work image by image in two worker processes, cmsf and kornia on batches of tensors in the main process.
B  Two views at 224 px of 600 JPEGs of 500 × 375, from the files to normalised batches of 64, with two workers.

The contestants take turns in every round; a figure is the median of the rounds. "cmsf is … times as fast" is the ratio
of the medians, and in brackets its range over the rounds. Torch has as many threads as there are cores (--threads) in
the main process, and one in each worker.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ours
import peers
import torch
from operations import operation_contestants
from pictures import small_pictures, write_photos
from PIL import Image
from reporting import Target, announce, describe_run, write
from rich.console import Console
from rich.table import Table
from rounds import Result, take_turns
from setting import PHOTOS, SMALL, WORKERS, Contestant
from torch import Tensor

PACKAGES = ("cmsf", "torch", "torchvision", "lightly", "kornia", "pillow", "numpy")
PHOTO_COUNT = 600
OPERATION_SHARE = 0.1
"""Of --seconds, for one operation in a round."""
CMSF = "cmsf"


def part_a(pictures: Tensor) -> list[Contestant]:
    arrays = pictures.permute(0, 2, 3, 1).contiguous().numpy()
    return [
        Contestant(CMSF, partial(ours.cmsf_batches, pictures, SMALL)),
        Contestant("lightly", partial(peers.lightly_batches, pictures, SMALL)),
        Contestant("kornia, slice", partial(peers.kornia_batches, pictures, SMALL, "slice")),
        Contestant("kornia, resample", partial(peers.kornia_batches, pictures, SMALL, "resample")),
        Contestant("torchvision v2, PIL", partial(peers.torchvision_batches, arrays, Image.fromarray, SMALL)),
        Contestant("torchvision v2, tensors", partial(peers.torchvision_batches, pictures, peers.as_it_is, SMALL)),
    ]


def targets_a(results: dict[str, Result]) -> list[Target]:
    mine = results[CMSF]
    return [Target("images/s", mine.median, 4000), Target("times lightly", mine.times(results["lightly"]), 3)]


def part_b(paths: list[Path]) -> list[Contestant]:
    return [
        Contestant(CMSF, partial(ours.cmsf_photo_batches, paths, PHOTOS)),
        Contestant("torchvision v2, PIL", partial(peers.torchvision_batches, paths, peers.open_file, PHOTOS)),
        Contestant("torchvision v2, tensors", partial(peers.torchvision_batches, paths, peers.decode_file, PHOTOS)),
    ]


def targets_b(results: dict[str, Result]) -> list[Target]:
    mine = results[CMSF]
    peer = fastest(result for result in results.values() if result is not mine)
    return [Target(f"times {peer.name}", mine.times(peer), 1.5)]


def fastest(results: Iterable[Result]) -> Result:
    """Of a peer's ways to do the same, the one that counts."""
    return max(results, key=lambda result: result.median)


def main() -> None:
    chosen = _arguments()
    torch.manual_seed(0)
    console = Console(highlight=False)
    report: dict[str, Any] = describe_run(PACKAGES) | {
        "threads": {"main": chosen.threads, "workers": WORKERS, "a worker": 1},
        "images": "made up" if chosen.cifar is None else chosen.cifar.name,
        "parts": {},
    }
    announce(console, report["machine"], chosen.threads)
    parts = "AB" if chosen.part == "all" else chosen.part
    pictures = small_pictures(chosen.cifar) if "A" in parts else torch.empty(0)

    def turns(contestants: Sequence[Contestant], seconds: float) -> list[Result]:
        return take_turns(contestants, chosen.rounds, seconds, chosen.threads)

    def keep(part: str, found: dict[str, Any]) -> None:
        """At once, for the next part may take long."""
        report["parts"][part] = found
        write(report, chosen.out)

    if "A" in parts:
        results = turns(part_a(pictures), chosen.seconds)
        what = "made-up images" if chosen.cifar is None else "CIFAR-10"
        keep("A", show(console, f"A  two views of {what} at 32 px", results, targets_a))
        costs = {
            operation: turns(ways, chosen.seconds * OPERATION_SHARE)
            for operation, ways in operation_contestants(pictures).items()
        }
        keep("A, operations", show_operations(console, costs))
    if "B" in parts:
        with tempfile.TemporaryDirectory() as folder:
            results = turns(part_b(write_photos(Path(folder), PHOTO_COUNT)), chosen.seconds)
        keep("B", show(console, "B  two views of 500 × 375 JPEGs at 224 px", results, targets_b))
    console.print(f"all rounds: {chosen.out}", markup=False)


def show(
    console: Console, title: str, results: Sequence[Result], targets: Callable[[dict[str, Result]], list[Target]]
) -> dict[str, Any]:
    """Print the table of a part and return its part of the report."""
    by_name = {result.name: result for result in results}
    mine = by_name[CMSF]
    table = Table("contestant", title=title, title_justify="left")
    for column in ("images/s", "min to max", "cmsf is … times as fast"):
        table.add_column(column, justify="right")
    for result in results:
        range_of_speed = f"{min(result.rounds):,.0f} to {max(result.rounds):,.0f}"
        table.add_row(result.name, f"{result.median:,.0f}", range_of_speed, _ratio(mine, result))
    console.print(table)
    reached = targets(by_name)
    for target in reached:
        console.print(f"  cmsf: {target}")
    return {
        "images per second": {result.name: _record(result) for result in results},
        "targets": [target.record() for target in reached],
    }


def show_operations(console: Console, costs: dict[str, list[Result]]) -> dict[str, Any]:
    """Print what each operation costs and return it for the report."""
    table = Table("operation", "by", title="A  single operations on 256 × 3 × 32 × 32", title_justify="left")
    for column in ("ms a batch", "cmsf is … times as fast"):
        table.add_column(column, justify="right")
    for operation, results in costs.items():
        mine = next(result for result in results if result.name == CMSF)
        for result in results:
            table.add_row(
                operation if result is mine else "",
                result.name,
                f"{1000 * SMALL.batch / result.median:.2f}",
                _ratio(mine, result),
                end_section=result is results[-1],
            )
    console.print(table)
    return {operation: {result.name: _record(result) for result in results} for operation, results in costs.items()}


def _ratio(mine: Result, other: Result) -> str:
    if mine is other:
        return "–"
    by_round = mine.times_by_round(other)
    return f"{mine.times(other):.2f} ({min(by_round):.2f} to {max(by_round):.2f})"


def _record(result: Result) -> dict[str, Any]:
    return {"median": round(result.median, 1), "rounds": [round(speed, 1) for speed in result.rounds]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("A", "B", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads in the main process")
    parser.add_argument("--cifar", type=Path, help="an .npz with x_train (n, 32, 32, 3) uint8; else made-up images")
    parser.add_argument("--out", type=Path, default=Path("docs/results/bench/views.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
