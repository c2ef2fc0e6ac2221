"""Batches for training and evaluation, ready to be viewed: cut from memory, or by processes that read ahead."""

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

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cmsf.data.dataset import Split
from cmsf.data.images import Images, Unreadable
from cmsf.data.prepare import STORED_SCALE
from cmsf.data.transforms import Batch, Crop, CroppedBatch, WholeBatch, crop_views, to_device
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput

Plan = Iterable[tuple[int, Tensor]]
"""What to read: the epoch and the indices of each batch."""

_READ_AHEAD = 3
_MOST_WORKERS = 16
_MOST_DEATHS = 3
_MOMENT = 5.0
_PR_SET_PDEATHSIG = 1


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def load_batches(
    split: Split,
    plan: Plan,
    crops: Mapping[int, Crop],
    *,
    seed: int,
    device: torch.device | str,
    workers: int,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
    say: Callable[[str], None] = _say,
) -> Iterator[Batch]:
    """The batches of a plan, in its order. What they hold depends on the plan and the seed, not on the workers.

    Images of one size in memory go to the device whole. Others are decoded where they are files, and cut to the size of
    each view, by `workers` processes (0: by this one), so that only what is seen travels. The first image that cannot
    be read raises Unreadable; or, with `on_unreadable`, each is told to it by index and left out of its batch, and a
    batch of which nothing is left is passed over. Where a worker dies, new ones read again what is not here yet.
    """
    device = torch.device(device)
    if isinstance(split.images, Tensor):
        for epoch, index in plan:
            pictures = split.images[index]
            pictures = pictures.pin_memory() if device.type == "cuda" else pictures
            yield WholeBatch(index, seed, epoch, to_device(pictures, device))
        return
    if not isinstance(split.images, Images) and multiprocessing.get_start_method() != "fork":
        workers = 0  # pictures in memory are shared by forking, or not at all
    cutter = _Cutter(split, dict(crops), seed, tolerant=on_unreadable is not None)
    for epoch, index, parts, broken in _cut(cutter, plan, workers, device, say):
        if isinstance(parts, BadInput):
            raise parts
        for i, error in broken:
            assert on_unreadable is not None
            on_unreadable(i, error)
        if len(index):
            yield CroppedBatch(index, seed, epoch, parts, device)


def _cut(cutter: _Cutter, plan: Plan, workers: int, device: torch.device, say: Callable[[str], None]) -> Iterator[_Cut]:
    """What the workers make of a plan. Those that die are replaced, but not for ever."""
    entries, asked, deaths = iter(plan), _Asked(), 0
    while True:
        try:
            for cut in _by_workers(cutter, asked.over(entries), workers, device):
                asked.answered()
                deaths = 0
                yield cut
            return
        except _WorkerDied as error:
            deaths += 1
            if deaths == _MOST_DEATHS:
                raise BadInput(
                    f"{deaths} times in a row, processes that decode images died before a batch was read ({error}); "
                    f"use fewer --workers than {workers}, or find out who ends them"
                ) from None
            say(f"a process that decodes images died ({error}); new ones read on from where it was")


def _by_workers(cutter: _Cutter, plan: Plan, workers: int, device: torch.device) -> Iterator[_Cut]:
    loader: DataLoader[_Cut] = DataLoader(
        cutter,
        sampler=plan,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_READ_AHEAD if workers else None,
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_parent,
    )
    with _deaths_noticed_in_waiting():
        batches = iter(loader)
    processes = getattr(batches, "_workers", [])
    try:
        while True:
            try:
                cut = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError):
                # The kernel closes the files of a process that ends, and only then lets us wait for it. In between its
                # batch breaks off (ConnectionResetError, EOFError) and its sentinel is ready, but is_alive() says yes.
                # So the sentinel tells who ends; to join it is short, for no code but the kernel's is left to run.
                ending = wait([process.sentinel for process in processes], timeout=_MOMENT if processes else 0)
                dead = [process for process in processes if process.sentinel in ending or not process.is_alive()]
                if not dead:
                    raise
                for process in dead:
                    process.join()
                cause = _cause(dead[0].exitcode)
                break
            yield cut
    finally:
        del batches  # the workers end with it, whoever keeps the traceback of an error
        for process in processes:  # but for one that hangs, and does not heed the SIGTERM that it would get
            if process.is_alive():
                process.kill()
    # Raised out here it does not hold on to the error, whose frames hold the workers.
    raise _WorkerDied(cause)


class _WorkerDied(Exception):
    """A process that decodes images is gone, and why."""


def _cause(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ", as where memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"{signal.Signals(-exit_code).name}{hint}"


class _Asked:
    """The entries of a plan that workers were asked for and have not answered, to be asked for again."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, Tensor]] = deque()

    def over(self, entries: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Those that are open, then the others."""
        yield from list(self._open)
        for entry in entries:
            self._open.append(entry)
            yield entry

    def answered(self) -> None:
        self._open.popleft()


@contextmanager
def _deaths_noticed_in_waiting() -> Iterator[None]:
    """torch raises the death of a worker wherever this process is, in the middle of a step too; we ask at the queue."""
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


def default_workers() -> int:
    """One process a core: decoding is what they are for. Those who train together share the cores."""
    return max(1, min(_MOST_WORKERS, available_cores() // World.from_env().local_size))


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
        images, enough = self.split.images, STORED_SCALE * max(crop.size for crop in self.crops.values())
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
        parts = crop_views(list(whole.values()), index, self.crops, self.seed, epoch) if whole else {}
        return epoch, index, parts, broken


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and SIGTERM reach the whole group; a worker goes on until its parent has finished the step, and gone.

    Where the parent is killed, Linux ends the worker with it: it would hold what it inherited, the run's lock too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def worker_count(asked: int | None) -> int:
    return default_workers() if asked is None else asked
