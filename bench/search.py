"""The search of a bank beside the one matrix product that an exact search cannot avoid, and beside the dense way.

    python bench/search.py --out docs/results/bench/search.json

256 queries, a bank of 128,000 rows of 512, float32, one thread: search, gathering, loss and gradient. The limit is the
product of the queries with the bank into memory that is there. The dense way is what one writes first: similarities of
targets and of predictions with all rows, the latter with gradient, a mask as large as both, and topk over everything.
Times are of the processor, so that other work on the machine counts less. Memory is the growth of the
process at its peak.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory import read_status
from reporting import Target, measure_from_command_line
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.method.losses import constrained_mean_shift
from cmsf.method.rows import Rows
from cmsf.method.search import Candidates

SIZE, DIM, BATCH = 128_000, 512, 256
GROWTH = (8_000, 32_000, 128_000, 512_000, 1_000_000)
COMPANION_K = 10
LISTED = "a list of k'"
Job = Callable[[], Any]

# What it is, how many classes, how it is searched, how many neighbours, the goal in products.
SEARCHES: dict[str, tuple[int, Constraint, int | None, float | None]] = {
    "unconstrained": (1000, Unconstrained(), 5, 1.15),
    "near companions": (1000, NearCompanion(COMPANION_K), 5, None),
    "same label, 1,000 classes": (1000, SameLabel(), 10, 0.1),
    "same label, 10 classes": (10, SameLabel(), 10, 0.3),
    "all of a label, 1,000 classes": (1000, SameLabel(), None, 0.05),
    "all of a label, 10 classes": (10, SameLabel(), None, 0.05),
}


@dataclass(frozen=True)
class Listed(Constraint):
    """C_i that is known beforehand: what is left of NearCompanion without the search for companions."""

    candidates: Candidates

    def __call__(self, query: Rows, rows: Rows) -> Candidates:
        return self.candidates


def make_rows(index: Tensor, classes: int) -> Rows:
    generator = torch.Generator().manual_seed(int(index[0]))
    embedding, companion = (normalize(torch.randn(len(index), DIM, generator=generator), dim=1) for _ in range(2))
    return Rows(embedding, index, index * 7919 % classes, companion)


def make_bank(size: int, classes: int) -> tuple[MemoryBank, Rows]:
    """Returns a full bank and its newest rows, which are the queries."""
    bank = MemoryBank(size, DIM, DIM)
    for index in torch.arange(size - BATCH).split(4000):
        bank.enqueue(make_rows(index, classes))
    query = make_rows(torch.arange(size - BATCH, size), classes)
    bank.enqueue(query)
    return bank, query


def ours(bank: MemoryBank, query: Rows, constraint: Constraint, k: int | None) -> Job:
    prediction = query.embedding.clone().requires_grad_()

    def run() -> None:
        if k is None:  # their sums are kept up to date as rows come and go, so that belongs to their cost
            bank.enqueue(query)
        constrained_mean_shift(prediction, query, bank, constraint, k)[0].backward()

    return run


def dense(bank: MemoryBank, query: Rows, constraint: Constraint, k: int) -> Job:
    prediction = query.embedding.clone().requires_grad_()
    rows = bank.rows()

    def run() -> None:
        mask = torch.ones(len(query), len(rows), dtype=torch.bool)  # one code for all constraints, as one writes it
        if isinstance(constraint, SameLabel):
            mask = query.label[:, None] == rows.label
        if isinstance(constraint, NearCompanion):
            near = (query.companion @ rows.companion.T).topk(constraint.k, dim=1).indices
            mask = torch.zeros_like(mask).scatter_(1, near, True)
        similarity = (query.embedding @ rows.embedding.T).masked_fill(~mask, -torch.inf)
        chosen = similarity.topk(min(k, constraint.k or k) if isinstance(constraint, NearCompanion) else k, dim=1)
        distance = 2 - 2 * prediction @ rows.embedding.T
        distance.gather(1, chosen.indices).mean().backward()

    return run


def product(bank: MemoryBank, query: Rows) -> Job:
    out = torch.empty(len(query), bank.size)
    return lambda: torch.mm(query.embedding, bank.embedding.T, out=out)


def seconds(jobs: dict[str, Job], rounds: int) -> dict[str, float]:
    """Returns the median time of the processor of each job; they take turns, and the first turn is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            start = time.process_time()
            job()
            if turn:
                spent[name].append(time.process_time() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def peak_growth(way: str) -> float:
    """By how many MB the memory of a process of its own grows at its peak: a plain search, and one by label (Linux)."""
    bank, query = make_bank(SIZE, 1000)
    jobs = [
        {"ours": ours, "dense": dense}[way](bank, query, constraint, 5) for constraint in (Unconstrained(), SameLabel())
    ]
    torch.set_num_threads(1)
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for job in jobs:
        job()
    return round((read_status("VmHWM") - before) / 1e6, 1)


def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    jobs: dict[str, Job] = {}
    for classes in (1000, 10):
        bank, query = make_bank(SIZE, classes)
        if classes == 1000:
            jobs["the product"] = product(bank, query)
            for name, constraint in (("unconstrained", Unconstrained()), ("self", NearCompanion(COMPANION_K))):
                jobs[f"dense, {name}"] = dense(bank, query, constraint, 5)
            jobs["dense, same label"] = dense(bank, query, SameLabel(), 10)
            jobs[LISTED] = ours(bank, query, Listed(NearCompanion(COMPANION_K)(query, bank.rows())), 5)
        for name, (count, constraint, k, _) in SEARCHES.items():
            if count == classes:  # whole labels on a bank of their own, for they enqueue
                jobs[name] = ours(*(make_bank(SIZE, classes) if k is None else (bank, query)), constraint, k)
    spent = seconds(jobs, rounds)
    limit = spent["the product"]
    both = spent["unconstrained"] + spent["near companions"]
    times = "times the product"
    targets = [
        Target(name, spent[name] / limit, goal, times, at_most=True)
        for name, (_, _, _, goal) in SEARCHES.items()
        if goal is not None
    ]
    targets += [
        Target("self: both terms, two banks", both / limit, 2.2, times, at_most=True),
        Target("a list of k', on top of its search", spent[LISTED] / limit, 0.02, times, at_most=True),
        Target("unconstrained", spent["dense, unconstrained"] / spent["unconstrained"], 3.5, "times the dense way"),
        Target("self", (spent["dense, unconstrained"] + spent["dense, self"]) / both, 3, "times the dense way"),
        Target(
            "same label", spent["dense, same label"] / spent["same label, 1,000 classes"], 20, "times the dense way"
        ),
    ]
    memory = {}
    for way in ("ours", "dense"):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            memory[way] = process.apply(peak_growth, (way,))
    targets.append(Target("memory", memory["ours"] / memory["dense"], 1 / 3, "of the dense way's", at_most=True))
    growth = {}
    for size in GROWTH:
        bank, query = make_bank(size, 1000)
        sized = {"the product": product(bank, query)}
        sized |= {name: ours(bank, query, *SEARCHES[name][1:3]) for name in SEARCHES if "10 classes" not in name}
        growth[size] = seconds(sized, max(1, rounds // 2))
        del bank, query, sized
    return {"seconds": spent, "peak MB": memory, "seconds by rows": growth, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
