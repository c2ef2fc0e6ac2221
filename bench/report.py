"""How long analysis and page of 50,000 images with 512 features, and 10,000 test images, take once there are features.

    python bench/report.py --out docs/results/bench/report.json

Features about a hundred centres, pictures of noise at 32 px, a tenth of the labels wrong.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from reporting import Target, measure_from_command_line
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.analysis.figures.gallery import one_a_class_in_turn
from cmsf.data import Dataset, Split
from cmsf.report.collect import collect_classes, collect_suspects
from cmsf.report.contents import Report, RunReport
from cmsf.report.galleries import feature_gallery
from cmsf.report.image_pool import EmbeddedImages, PoolBuilder
from cmsf.report.page import render

TRAIN, TEST, WIDTH, CLASSES, SIDE, IMAGES = 50_000, 10_000, 512, 100, 32, 2_400


def split(count: int, seed: int) -> tuple[Split, Tensor]:
    """Images, and features about their classes' centres."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    truth = torch.randint(CLASSES, (count,), generator=random)
    wrong = torch.rand(count, generator=random) < 0.1
    label = torch.where(wrong, torch.randint(CLASSES, (count,), generator=random), truth)
    pictures = torch.randint(256, (count, 3, SIDE, SIDE), generator=random, dtype=torch.uint8)
    features = normalize(centres[truth] + 2 * torch.randn(count, WIDTH, generator=random), dim=1)
    return Split(pictures, [f"{i}.png" for i in range(count)], truth, label), features


def measure(rounds: int) -> dict[str, Any]:
    """Once: the search takes most of the time, and is in the row of the evaluation."""
    (train, looks), (test, others) = split(TRAIN, 1), split(TEST, 2)
    names = tuple(f"class {number}" for number in range(CLASSES))
    data = Dataset("noise", names, names, train, test, "made up")
    seconds, start = {}, time.monotonic()

    def passed(what: str) -> None:
        seconds[what] = round(time.monotonic() - start - sum(seconds.values()), 1)

    images = EmbeddedImages.with_neighbours(data, looks, others)
    passed("graph of neighbours")
    builder = PoolBuilder(images, IMAGES)
    galleries = (feature_gallery(builder, 0),)
    classes, _ = collect_classes(images)
    suspects, about_suspects, _ = collect_suspects(builder)
    passed("classes and suspects")
    builder.add_with_neighbours(one_a_class_in_turn(train, 0).tolist())
    pool = builder.build()
    passed("thumbnails and map")
    run = RunReport(
        "noise",
        "noise",
        "complete",
        images=pool,
        galleries=galleries,
        classes=classes,
        suspects=suspects,
        about_suspects=about_suspects,
    )
    page = render(Report((run,), "2026-01-01T00:00:00+00:00", "bench"))
    passed("page")
    megabytes, total = len(page.encode()) / 1e6, sum(seconds.values())
    targets = [
        Target("50,000 and 10,000 images with 512 features", total, 60, "s", at_most=True),
        Target("the page", megabytes, 5, "MB", at_most=True),
    ]
    return {"images": [TRAIN, TEST], "features": WIDTH, "seconds": seconds, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
