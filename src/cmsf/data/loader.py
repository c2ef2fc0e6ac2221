"""Loads batches for training and evaluation: whole from memory, or cropped by worker processes that read ahead."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cmsf.data.dataset import Split
from cmsf.data.images import Images, Unreadable
from cmsf.data.transforms import STORED_SCALE, Batch, Crop, CroppedBatch, WholeBatch, crop_views, to_device
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput

BatchIndex = tuple[int, Tensor]
"""The epoch of a batch, and the indices of its images: what a batch sampler yields."""

_PREFETCH_FACTOR = 3
_MAX_WORKERS = 16
_MAX_DEATHS = 3
_JOIN_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def _print_error(text: str) -> None:
    print(text, file=sys.stderr)


def load_batches(
    split: Split,
    batch_sampler: Iterable[BatchIndex],
    crops: Mapping[int, Crop],
    *,
    seed: int,
    device: torch.device | str,
    workers: int,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
    warn: Callable[[str], None] = _print_error,
) -> Iterator[Batch]:
    """Yields the batches of a batch sampler, in its order. The workers change nothing of what they hold.

    Images of one size in memory go to the device whole. Others are decoded where they are files, and cropped to the
    size of each view, by `workers` processes (0: by this one), so that only what is seen travels. The first image that
    cannot be read raises Unreadable; or, with `on_unreadable`, each is passed to it with its index and left out of its
    batch, and an empty batch is skipped. Where a worker dies, new ones read again what is not here yet.
    """
    device = torch.device(device)
    if isinstance(split.images, Tensor):
        for epoch, index in batch_sampler:
            images = split.images[index]
            images = images.pin_memory() if device.type == "cuda" else images
            yield WholeBatch(index, seed, epoch, to_device(images, device))
        return
    if not isinstance(split.images, Images) and multiprocessing.get_start_method() != "fork":
        workers = 0  # images in memory are shared by forking, or not at all
    batches = _BatchDataset(split, dict(crops), seed, skip_unreadable=on_unreadable is not None)
    for epoch, index, views, unreadable in _load(batches, batch_sampler, workers, device, warn):
        if isinstance(views, BadInput):
            raise views
        for i, error in unreadable:
            assert on_unreadable is not None
            on_unreadable(i, error)
        if len(index):
            yield CroppedBatch(index, seed, epoch, views, device)


def _load(
    batches: _BatchDataset,
    batch_sampler: Iterable[BatchIndex],
    workers: int,
    device: torch.device,
    warn: Callable[[str], None],
) -> Iterator[_LoadedBatch]:
    """Yields what the workers load. Those that die are replaced, but not for ever."""
    remaining, deaths = iter(batch_sampler), 0
    pending: deque[BatchIndex] = deque()

    def pending_first() -> Iterator[BatchIndex]:
        yield from list(pending)
        for batch in remaining:
            pending.append(batch)
            yield batch

    while True:
        try:
            for batch in _load_with_workers(batches, pending_first(), workers, device):
                pending.popleft()
                deaths = 0
                yield batch
            return
        except _WorkerDied as error:
            deaths += 1
            if deaths == _MAX_DEATHS:
                raise BadInput(
                    f"{deaths} times in a row, processes that decode images died before a batch was read ({error}); "
                    f"use fewer --workers than {workers}, or find out what kills them"
                ) from None
            warn(f"a process that decodes images died ({error}); new ones read on from where it was")


def _load_with_workers(
    batches: _BatchDataset, batch_sampler: Iterable[BatchIndex], workers: int, device: torch.device
) -> Iterator[_LoadedBatch]:
    loader: DataLoader[_LoadedBatch] = DataLoader(
        batches,
        sampler=batch_sampler,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PREFETCH_FACTOR if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_parent,
    )
    with _restored_sigchld():
        loaded = iter(loader)
    processes = getattr(loaded, "_workers", [])
    try:
        while True:
            try:
                batch = next(loaded)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError):
                # The kernel closes the files of a process that ends, and only then lets us wait for it. In between its
                # batch breaks off (ConnectionResetError, EOFError) and its sentinel is ready, but is_alive() says yes.
                # So the sentinel tells who ends; to join it is short, for no code but the kernel's is left to run.
                ending = wait([process.sentinel for process in processes], timeout=_JOIN_SECONDS if processes else 0)
                dead = [process for process in processes if process.sentinel in ending or not process.is_alive()]
                if not dead:
                    raise
                for process in dead:
                    process.join()
                cause = _cause_of_death(dead[0].exitcode)
                break
            yield batch
    finally:
        del loaded  # the workers end with it, whoever keeps the traceback of an error
        for process in processes:  # but for one that hangs, and does not heed the SIGTERM that it would get
            if process.is_alive():
                process.kill()
    # Raised out here it does not hold on to the error, whose frames hold the workers.
    raise _WorkerDied(cause)


class _WorkerDied(Exception):
    """Why a process that decodes images has ended."""


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ", as where memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"{signal.Signals(-exit_code).name}{hint}"


@contextmanager
def _restored_sigchld() -> Iterator[None]:
    """Takes torch's handler of SIGCHLD away: it raises in the middle of a step too, and we ask at the queue."""
    if threading.current_thread() is not threading.main_thread():
        yield  # then torch does not either
        return
    before = signal.getsignal(signal.SIGCHLD)
    if before == signal.SIG_IGN:  # as a parent may leave it: then no exit code is kept, and nobody seems to die
        before = signal.SIG_DFL
        signal.signal(signal.SIGCHLD, before)
    yield
    by_torch = getattr(before, "__module__", "").startswith("torch.")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if by_torch or before is None else before)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _LoadedBatch(NamedTuple):
    epoch: int
    indices: Tensor
    views: dict[int, Tensor] | BadInput
    unreadable: list[tuple[int, Unreadable]]


@dataclass(frozen=True)
class _BatchDataset(TorchDataset[_LoadedBatch]):
    """Decodes, crops and collates a batch, in a worker."""

    split: Split
    crops: dict[int, Crop]
    seed: int
    skip_unreadable: bool

    def __getitem__(self, batch: BatchIndex) -> _LoadedBatch:
        epoch, index = batch
        images, min_side = self.split.images, STORED_SCALE * max(crop.size for crop in self.crops.values())
        decoded: dict[int, Tensor] = {}
        unreadable: list[tuple[int, Unreadable]] = []
        try:
            # One after another: each worker is one thread.
            for place, i in enumerate(index.tolist()):
                try:
                    decoded[place] = images.decode(i, min_side) if isinstance(images, Images) else images[i]
                except Unreadable as error:
                    if not self.skip_unreadable:
                        raise
                    unreadable.append((i, error.with_traceback(None)))
        except BadInput as error:  # as a value, for an exception would arrive wrapped in the worker's traceback
            return _LoadedBatch(epoch, index, error, [])
        index = index[list(decoded)]
        views = crop_views(list(decoded.values()), index, self.crops, self.seed, epoch) if decoded else {}
        return _LoadedBatch(epoch, index, views, unreadable)


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignores Ctrl-C and SIGTERM, which reach the whole group: a worker goes on until its parent has ended the step.

    Where the parent is killed, Linux ends the worker with it: it would hold what it inherited, the run's lock too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def worker_count(workers: int | None) -> int:
    """Returns the number of workers; None: one a core, of this process's share where several train together."""
    if workers is not None:
        return workers
    return max(1, min(_MAX_WORKERS, available_cores() // World.from_env().local_size))
