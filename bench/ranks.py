"""How the search of a bank is divided among processes: time and memory of one, two by queries, and two by rows.

    python bench/ranks.py --out docs/results/bench/ranks.json

A bank of the paper's size, 128,000 rows of 512 with companions, and a batch of 256 queries; every process computes with
one thread. The ways take turns. Wanted: with the bank in two shares, half of the memory, and about half of the time.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from reporting import Target, measure_from_command_line
from torch.nn.functional import normalize

from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, NearCompanion, Unconstrained
from cmsf.method.distributed_bank import ReplicatedBank, ShardedBank
from cmsf.method.rows import Rows
from cmsf.utils.distributed import World, init_process_group

SIZE, DIM, BATCH, K = 128_000, 512, 256, 5
CONSTRAINTS: dict[str, Constraint] = {"unconstrained": Unconstrained(), "near companions": NearCompanion(5)}


def search(rank: int, size: int, port: int, rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with init_process_group(World(rank, size), torch.device("cpu")) as world:
        alone = partial(MemoryBank)
        ways = (
            {"one process": alone}
            if size == 1
            else {
                "two, by queries": partial(ReplicatedBank, world),
                "two, by rows": partial(ShardedBank, world),
            }
        )
        banks = {name: _filled(make(SIZE, DIM, DIM)) for name, make in ways.items()}
        query = _rows(torch.arange(SIZE - BATCH, SIZE))
        found: dict[str, Any] = {}
        for name, bank in banks.items():
            held = bank.embedding.nbytes + (0 if bank.companion is None else bank.companion.nbytes)
            found[name] = {"megabytes a process": round(held / 1e6, 1)} | {kind: [] for kind in CONSTRAINTS}
        for turn in range(rounds + 1):
            for name, bank in banks.items():
                for kind, constraint in CONSTRAINTS.items():
                    world.barrier()
                    start = time.perf_counter()
                    bank.search(query, constraint, K)
                    world.barrier()
                    if turn:  # the first one warms up
                        found[name][kind].append(time.perf_counter() - start)
        if world.is_main:
            out.write_text(json.dumps(found))


def _rows(index: torch.Tensor) -> Rows:
    generator = torch.Generator().manual_seed(int(index[0]))
    embedding, companion = (normalize(torch.randn(len(index), DIM, generator=generator), dim=1) for _ in range(2))
    return Rows(embedding, index, None, companion)


def _filled(bank: MemoryBank) -> MemoryBank:
    for index in torch.arange(SIZE).split(BATCH):
        bank.enqueue(_rows(index))
    return bank


def measure(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            out = Path(folder) / f"{size}.json"
            torch.multiprocessing.spawn(search, (size, port, rounds, out), nprocs=size)
            found |= json.loads(out.read_text())
    alone = found.pop("one process")
    targets = []
    for way, figures in found.items():
        for kind in CONSTRAINTS:
            faster = statistics.median(alone[kind]) / statistics.median(figures[kind])
            targets.append(Target(f"{way}, {kind}", faster, 1.6, "times as fast as one process"))
    shards, whole = found["two, by rows"]["megabytes a process"], alone["megabytes a process"]
    targets.append(Target("two, by rows", shards / whole, 0.5, "of the bank's memory in each process", at_most=True))
    return {"seconds": found | {"one process": alone}, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
