"""How fast cmsf evaluates, beside faiss, scikit-learn and the bare arithmetic: ratios from one run on one machine.

    pip install -r bench/requirements.txt
    python bench/evaluation.py --rounds 5

k-NN    20-NN classification of 10,000 queries in 50,000 × 512 unit vectors of float32: the exact neighbours, and for
        cmsf the vote as well. "The bare product" is queries @ train.T alone, in cmsf's chunks and into one block of
        memory. scikit-learn is asked for Euclidean distances, which order unit vectors as cosines do, and for
        cosines; the faster counts. faiss's index (IndexFlatIP) is built beforehand. faiss brings an OpenBLAS of its
        own, which takes its oldest kernels on a processor that is newer than itself; so faiss is measured as it is
        installed, and once more with OPENBLAS_CORETYPE set to what numpy's OpenBLAS makes of this processor.
linear  A linear layer at one weight decay, from nothing to the same tolerance, and the loss that each ends at.
        scikit-learn's LogisticRegression is called plainly, in both precisions; the faster counts.

All have all cores. The contestants take turns in every round; a figure is the median of the rounds. "cmsf is … times as
fast" is the ratio of the medians, and in brackets its range over the rounds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from fits import DECAY, fit_jobs, make_problem
from jobs import Timed, take_turns
from reporting import Target, announce, describe_run, write
from rich.console import Console
from rich.table import Table
from searches import CLASSES, FAISS, FEATURES, PRODUCT, QUERIES, TRAIN, agreement, search_jobs, vectors

PACKAGES = ("cmsf", "torch", "faiss-cpu", "scikit-learn", "scipy", "numpy")
PROBLEMS = ((10_000, 512, 10), (3_680, 2_048, 37))
"""Images, features, classes; the second is as large as Oxford-IIIT Pet with a ResNet-50's features."""
CMSF, SCIKIT_LEARN = "cmsf", "scikit-learn"
NOISE = 0.05
Results = dict[str, Timed]


def search_targets(results: Results) -> list[Target]:
    mine = results[CMSF]
    as_installed = next(one for name, one in results.items() if name.startswith(f"{FAISS} ("))
    peer = fastest(results, SCIKIT_LEARN)
    return [
        Target("times the speed of the bare product", mine.times_as_fast(results[PRODUCT]), round(1 / 1.3, 2)),
        Target(f"times {as_installed.name}", mine.times_as_fast(as_installed), 3),
        Target(f"times {peer.name}", mine.times_as_fast(peer), 1.4),
    ]


def fit_targets(results: Results) -> list[Target]:
    peer = fastest(results, SCIKIT_LEARN)
    return [Target(f"times {peer.name}, up to noise", results[CMSF].times_as_fast(peer), 1 - NOISE)]


def fastest(results: Results, library: str) -> Timed:
    """Of a library's ways to do the same, the one that counts."""
    return min((one for name, one in results.items() if name.startswith(library)), key=lambda one: one.median)


def main() -> None:
    chosen = _arguments()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    console = Console(highlight=False)
    report: dict[str, Any] = describe_run(PACKAGES) | {"threads": threads, "parts": {}}
    announce(console, report["machine"], threads)

    def keep(part: str, found: dict[str, Any]) -> None:
        """At once, for the next part takes a while."""
        report["parts"][part] = found
        write(report, chosen.out)

    train, query, label = vectors()
    with ExitStack() as stack:
        results = take_turns(search_jobs(train, query, label, threads, stack), chosen.rounds)
    found = show(console, f"20-NN of {QUERIES:,} in {TRAIN:,} × {FEATURES}, {CLASSES} classes", results, search_targets)
    keep("k-NN", found | {"beside cmsf's neighbours": agreement(train, query, results)})
    for images, features, classes in PROBLEMS:
        problem = make_problem(images, features, classes)
        results = take_turns(fit_jobs(problem), chosen.rounds)
        loss = {name: problem.loss(one.outcome) for name, one in results.items()}
        size = f"{images:,} × {features:,}, {classes} classes"
        found = show(console, f"linear fit of {size}, weight decay {DECAY:g}", results, fit_targets, loss)
        keep(f"linear, {size}", found | {"weight decay": DECAY, "loss": loss})
    console.print(f"all rounds: {chosen.out}", markup=False)


def show(
    console: Console,
    title: str,
    results: Results,
    targets: Callable[[Results], list[Target]],
    loss: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Print the table of a part and return its part of the report."""
    mine = results[CMSF]
    table = Table("contestant", title=title, title_justify="left")
    for column in ("seconds", "min to max", "cmsf is … times as fast", *(["loss"] if loss else [])):
        table.add_column(column, justify="right")
    for name, one in results.items():
        by_round = mine.times_by_round(one)
        ratio = (
            f"{mine.times_as_fast(one):.2f} ({min(by_round):.2f} to {max(by_round):.2f})" if one is not mine else "–"
        )
        spread = f"{min(one.seconds):.3f} to {max(one.seconds):.3f}"
        table.add_row(name, f"{one.median:.3f}", spread, ratio, *([f"{loss[name]:.6f}"] if loss else []))
    console.print(table)
    reached = targets(results)
    for target in reached:
        console.print(f"  cmsf: {target}", markup=False)
    return {
        "seconds": {name: _record(one) for name, one in results.items()},
        "cmsf is so many times as fast": {name: round(mine.times_as_fast(one), 3) for name, one in results.items()},
        "targets": [target.record() for target in reached],
    }


def _record(one: Timed) -> dict[str, Any]:
    return {"median": round(one.median, 4), "rounds": [round(seconds, 4) for seconds in one.seconds]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--out", type=Path, default=Path("docs/results/bench/evaluation.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
