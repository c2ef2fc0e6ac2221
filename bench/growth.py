"""How time and memory grow with the number of images: training, evaluation, suspects and the report's graph.

    python bench/growth.py --out docs/results/bench/growth.json

1,000 to 1,000,000 images, each figure from a process of its own, with all cores. Images are made up.

train       An epoch of cmsf-self with the small residual net on 28 px images, timed over a few steps with a full bank
            (at most 128,000 rows) and scaled to the epoch.
k-NN        20-NN of 10,000 queries in so many features of 128 numbers.
linear      One fit of a linear layer to convergence, ten classes, weight decay 1e-3.
suspects    The 20-NN of every image among all others: exactness asks for all pairs, so it grows with the square. Above
            100,000 images it is timed on 10,000 queries and scaled.
report      The graph of 100 neighbours for all images, likewise; so the memory of the largest size is that of a part.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from memory import read_status
from reporting import Target, measure_from_command_line
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.analysis.neighbor_graph import build_graph
from cmsf.data import Dataset, Split
from cmsf.data.transforms import WholeBatch
from cmsf.evaluation.knn import KNN_CLASSIFIERS, classify, k_nearest
from cmsf.evaluation.linear import fit_path
from cmsf.method.build import make_learner
from cmsf.method.rows import Rows
from cmsf.recipes import get_recipe
from cmsf.training.resolve import resolve
from cmsf.utils.constants import UNKNOWN

SIZES = (1_000, 10_000, 100_000, 1_000_000)
WIDTH, CLASSES, QUERIES, SIDE, STEPS, GRAPH = 128, 10, 10_000, 28, 20, 100
PICTURE = Path("docs/images/growth.png")
QUADRATIC = ("suspects", "report")
Found = tuple[float, float]
"""Seconds, and bytes, the images or features included."""


def features(count: int) -> tuple[Tensor, Tensor]:
    label = torch.randint(CLASSES, (count,))
    return normalize(torch.randn(CLASSES, WIDTH)[label] + 2 * torch.randn(count, WIDTH), dim=1), label


def train(count: int) -> float:
    pictures = torch.randint(256, (count, 3, SIDE, SIDE), dtype=torch.uint8)
    unknown = torch.full((count,), UNKNOWN)
    data = Dataset("growth", (), (), Split(pictures, [str(i) for i in range(count)], unknown, unknown), None, "none")
    recipe = resolve(get_recipe("cmsf-self-small"), data, SIDE)
    learner, batch = make_learner(recipe, unknown, "cpu"), recipe.batch_size
    dim = learner.encoders.dim
    for index in torch.arange(recipe.bank_size).split(min(4000, recipe.bank_size)):
        rows = normalize(torch.randn(2, len(index), dim), dim=2)
        learner.bank.enqueue(Rows(rows[0], index, None, rows[1]))
    learner.supervision.companion_cache.embedding.copy_(normalize(torch.randn(count, dim), dim=1))
    start = 0.0
    for step in range(STEPS + 2):
        if step == 2:  # two steps warm up
            start = time.perf_counter()
        index = (torch.arange(batch) + step * batch) % count
        learner.step(WholeBatch(index, 0, step, pictures[index]), 0.99)
    return (time.perf_counter() - start) / STEPS * (count // batch)


def knn(count: int) -> float:
    (rows, label), (query, _) = features(count), features(QUERIES)
    return timed(lambda: classify(query, rows, label, KNN_CLASSIFIERS))


def linear(count: int) -> float:
    rows, label = features(count)
    return timed(lambda: list(fit_path(rows, label, CLASSES, (1e-3,))))


def suspects(count: int) -> float:
    rows, _ = features(count)
    queries = torch.arange(count if count <= 100_000 else QUERIES)
    return timed(lambda: list(k_nearest(rows[queries], rows, 20, queries))) * count / len(queries)


def report(count: int) -> float:
    rows, _ = features(count)
    if count <= 100_000:
        return timed(lambda: build_graph(rows, None, GRAPH))
    queries = torch.arange(QUERIES)
    return timed(lambda: list(k_nearest(rows[queries], rows, GRAPH, queries))) * count / QUERIES


def timed(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


JOBS = {"train": train, "k-NN": knn, "linear": linear, "suspects": suspects, "report": report}


def one(name: str, count: int) -> Found:
    before = read_status("VmRSS")
    seconds = JOBS[name](count)
    return seconds, read_status("VmHWM") - before


def draw(found: dict[str, dict[int, Found]], picture: Path) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, by_size in found.items():
        sizes = list(by_size)
        left.loglog(sizes, [seconds for seconds, _ in by_size.values()], "o-", label=name)
        right.loglog(sizes, [memory / 1e9 for _, memory in by_size.values()], "o-", label=name)
    left.set(xlabel="images", ylabel="seconds", title="time")
    right.set(xlabel="images", ylabel="GB", title="memory, the images or features included")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(picture, dpi=120)


def measure(rounds: int) -> dict[str, Any]:
    """Once each: growth over a thousand times is not a matter of noise."""
    found: dict[str, dict[int, Found]] = {name: {} for name in JOBS}
    for name in JOBS:
        for count in SIZES:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found[name][count] = process.apply(one, (name, count))
            print(name, count, found[name][count], flush=True)
    draw(found, PICTURE)
    targets = []
    for name, by_size in found.items():
        (first, (before, _)), (last, (after, memory)) = list(by_size.items())[-2:]
        power, goal = math.log(after / before) / math.log(last / first), 2.1 if name in QUADRATIC else 1.15
        targets.append(Target(f"{name}, from 100,000 to 1,000,000", power, goal, "is the power of time", at_most=True))
        if name in QUADRATIC:  # of the largest size only a part was searched, and the graph not kept
            continue
        growth = memory / by_size[first][1]
        targets.append(Target(f"{name}, from 100,000 to 1,000,000", growth, 11, "times the memory", at_most=True))
    return {"seconds and bytes": found, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
