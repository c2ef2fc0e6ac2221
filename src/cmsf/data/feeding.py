"""Batches for training and evaluation, ready to be viewed: cut from memory, or by processes that read ahead."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cmsf.data.dataset import Split
from cmsf.data.images import Images, Unreadable
from cmsf.data.loading import STORED
from cmsf.errors import BadInput
from cmsf.views import Batch, Crop, CutBatch, WholeBatch, cut_views, to_device

Plan = Iterable[tuple[int, Tensor]]
"""What to read: the epoch and the indices of each batch."""

_READ_AHEAD = 3
_MOST_WORKERS = 16


def feed(
    split: Split,
    plan: Plan,
    crops: Mapping[int, Crop],
    *,
    seed: int,
    device: torch.device | str,
    workers: int,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
) -> Iterator[Batch]:
    """The batches of a plan, in its order. What they hold depends on the plan and the seed, not on the workers.

    Images of one size in memory go to the device whole. Others are decoded where they are files, and cut to the size of
    each view, by `workers` processes (0: by this one), so that only what is seen travels. The first image that cannot
    be read raises Unreadable; or, with `on_unreadable`, each is told to it by index and left out of its batch, and a
    batch of which nothing is left is passed over.
    """
    device = torch.device(device)
    if isinstance(split.pictures, Tensor):
        for epoch, index in plan:
            pictures = split.pictures[index]
            pictures = pictures.pin_memory() if device.type == "cuda" else pictures
            yield WholeBatch(index, seed, epoch, to_device(pictures, device))
        return
    if not isinstance(split.pictures, Images) and multiprocessing.get_start_method() != "fork":
        workers = 0  # pictures in memory are shared by forking, or not at all
    loader: DataLoader[_Cut] = DataLoader(
        _Cutter(split, dict(crops), seed, tolerant=on_unreadable is not None),
        sampler=plan,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_READ_AHEAD if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_parent,
    )
    batches = iter(loader)
    try:
        for epoch, index, parts, broken in batches:
            if isinstance(parts, BadInput):
                raise parts
            for i, error in broken:
                assert on_unreadable is not None
                on_unreadable(i, error)
            if len(index):
                yield CutBatch(index, seed, epoch, parts, device)
    finally:
        processes = getattr(batches, "_workers", [])
        del batches  # the workers end with it, whoever keeps the traceback of an error
        for process in processes:  # but for one that hangs, and does not heed the SIGTERM that it would get
            if process.is_alive():
                process.kill()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """One process a core: decoding is what they are for."""
    return min(_MOST_WORKERS, available_cores())


_Cut = tuple[int, Tensor, dict[int, Tensor] | BadInput, list[tuple[int, Unreadable]]]


@dataclass(frozen=True)
class _Cutter(TorchDataset[_Cut]):
    """A batch for a worker: an entry of the plan in, what its views show out."""

    split: Split
    crops: dict[int, Crop]
    seed: int
    tolerant: bool

    def __getitem__(self, entry: tuple[int, Tensor]) -> _Cut:
        epoch, index = entry
        images, enough = self.split.pictures, STORED * max(crop.size for crop in self.crops.values())
        whole: dict[int, Tensor] = {}
        broken: list[tuple[int, Unreadable]] = []
        try:
            # One after another: each worker is one thread.
            for place, i in enumerate(index.tolist()):
                try:
                    whole[place] = images.decode(i, enough) if isinstance(images, Images) else images[i]
                except Unreadable as error:
                    if not self.tolerant:
                        raise
                    broken.append((i, error.with_traceback(None)))
        except BadInput as error:  # as a value, for an exception would arrive wrapped in the worker's traceback
            return epoch, index, error, []
        index = index[list(whole)]
        parts = cut_views(list(whole.values()), index, self.crops, self.seed, epoch) if whole else {}
        return epoch, index, parts, broken


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and SIGTERM reach the whole group; a worker goes on until its parent has finished the step, and gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
