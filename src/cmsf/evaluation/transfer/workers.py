"""Processes that run the trials of one search side by side, each on one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import safetensors.torch
import torch

from cmsf.errors import BadInput
from cmsf.evaluation.transfer.quiet import quietly
from cmsf.evaluation.transfer.storage import connect
from cmsf.evaluation.transfer.study import begin, work
from cmsf.evaluation.transfer.trial import Problem

_LOOK_AGAIN = 0.5
_PATIENCE = 10.0
"""Seconds for all workers to record that their trials were given up."""


def work_in_parallel(
    problem: Problem,
    name: str,
    where: Path | str,
    trials: int,
    processes: int,
    seed: int,
    prune: bool,
    look: Callable[[], None],
) -> None:
    """Have `processes` workers go on with the study; `look` is called now and then meanwhile."""
    context = multiprocessing.get_context("spawn")
    with _handed_over(problem) as handed:
        workers: list[BaseProcess] = [
            context.Process(target=_worker, args=(*handed, name, where, trials, seed, prune), daemon=True)
            for _ in range(processes)
        ]
        try:
            for worker in workers:
                worker.start()
            running = list(workers)
            while running:
                wait([worker.sentinel for worker in running], _LOOK_AGAIN)
                look()
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    _check(worker)
                    running.remove(worker)
        finally:
            _stop(workers)


def _check(worker: BaseProcess) -> None:
    code = worker.exitcode
    if code is not None and code < 0:
        raise BadInput(
            f"a process of the search was killed ({signal.Signals(-code).name}); no finished trial is lost: search "
            "again to go on, with fewer processes if memory is short"
        )
    if code:
        raise RuntimeError("a process of the search failed; its error is above")


def _stop(workers: list[BaseProcess]) -> None:
    alive = [worker for worker in workers if worker.is_alive()]
    for worker in alive:
        worker.terminate()
    deadline = time.monotonic() + _PATIENCE
    for worker in alive:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.join()


@contextmanager
def _handed_over(problem: Problem) -> Iterator[tuple[Path, int, bool]]:
    """Tensors in a file that all processes map into memory; shared memory is scarce in containers."""
    with tempfile.TemporaryDirectory(prefix="cmsf-search-") as folder:
        file = Path(folder) / "problem.safetensors"
        tensors = {
            "train": problem.train,
            "train_label": problem.train_label,
            "val": problem.val,
            "val_label": problem.val_label,
        }
        safetensors.torch.save_file({key: value.contiguous() for key, value in tensors.items()}, file)
        yield file, problem.classes, problem.per_class


def _worker(
    file: Path, classes: int, per_class: bool, name: str, where: Path | str, trials: int, seed: int, prune: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; who started us stops us
    signal.signal(signal.SIGTERM, _interrupt)  # on which Optuna gives the trial up, and says so in the storage
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    problem = Problem(**safetensors.torch.load_file(file), classes=classes, per_class=per_class)
    try:
        with quietly():
            work(begin(connect(where), name, problem, seed, prune), problem, trials)
    except KeyboardInterrupt:
        sys.exit(0)


def _interrupt(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """If it is killed, nobody else would stop us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
