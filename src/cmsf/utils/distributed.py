"""Training in several processes, with the result of one: the only module that calls torch.distributed.

Each process holds an equal share of every batch, in the order of ranks. Encoder outputs are gathered, so each computes
the loss of the whole batch; the gradient goes back through its own share alone, and gradients are summed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cmsf.utils.errors import BadInput, FailedElsewhere, Interrupted
from cmsf.utils.files import FullDisk
from cmsf.utils.text import first_line

T = TypeVar("T")

_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # Of a step: a batch script that starts one process has the numbers of the whole job too.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""The environment's names of rank, size, local rank and local size."""
_COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""The main process may validate on a million images; gloo notices a dead process."""
_RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
_BUCKET = 2**25
"""Gradients in one all-reduce: 128 MB of float32."""
_BAD, _FULL = 1, 2
"""Why a process failed, as a number; signal numbers are added to _FULL."""


class FullDiskElsewhere(FullDisk, FailedElsewhere):
    """The disk is full for the process that writes."""


class ProcessLost(Exception):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class World:
    """This process and the size of its process group; with one process, every collective returns its input.

    local_rank, local_size: the same among the processes of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Reads rank and world size from the variables that torchrun, or Slurm's srun, has set."""
        for rank, size, local_rank, local_size in _VARIABLES:
            if rank not in environment or size not in environment:
                continue
            # Slurm has 4(x2) for two times four.
            local_processes = environment.get(local_size, "1").split("(")[0].split(",")[0]
            values = environment[rank], environment[size], environment.get(local_rank, "0"), local_processes
            try:
                world = cls(*map(int, values))
            except ValueError:
                raise BadInput(
                    f"{rank} {environment[rank]} and {size} {environment[size]} are not a rank and a world size; "
                    "start the processes by torchrun, or unset these variables"
                ) from None
            if not 0 <= world.rank < world.size:
                raise BadInput(
                    f"{rank} {world.rank} is out of range for {size} {world.size}; start the processes by torchrun"
                )
            if not world.alone:
                return world
        return cls()

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def chunk(self, count: int) -> slice:
        """Returns the contiguous share of this process of `count` items; shares differ by one at most."""
        share, more = divmod(count, self.size)
        first = self.rank * share + min(self.rank, more)
        return slice(first, first + share + (self.rank < more))

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers the rows of all processes, in the order of ranks; the gradient goes back to its own rows alone.

        That is right where every process computes the same loss of them and the gradients are summed later.
        """
        if self.alone:
            return rows
        gathered: Tensor = _Gather.apply(rows, self)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all processes; its gradient is summed too."""
        if self.alone:
            return tensor
        total: Tensor = _Sum.apply(tensor)
        return total

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """Returns the elementwise maximum over all processes."""
        if self.alone:
            return numbers
        box = torch.tensor([int(number) for number in numbers])
        _communicate(dist.all_reduce, box, dist.ReduceOp.MAX)
        return tuple(box.tolist())

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Runs work that may fail or be interrupted in one process; then all processes raise at the same place."""
        failure: BadInput | Interrupted | None = None
        try:
            done = work()
        except (BadInput, Interrupted) as error:
            failure = error
        # Of the processes with the most severe failure, the lowest rank reports it.
        own = 0 if failure is None else _severity(failure) * self.size + self.size - 1 - self.rank
        (worst,) = self.all_reduce_max(own)
        kind = worst // self.size
        if failure is not None and own == worst:
            raise failure
        if kind > _FULL:
            raise Interrupted(kind - _FULL)
        if worst:
            raise (FullDiskElsewhere if kind == _FULL else FailedElsewhere)(
                "another process of the run has failed; its message says why"
            )
        return done

    def run_on_main(self, work: Callable[[], T], otherwise: T) -> T:
        """Runs work in the main process; the others wait for it and get `otherwise`, and all raise what it raises."""
        return self.raise_on_all_ranks(work if self.is_main else lambda: otherwise)

    def check_same(self, number: int, name: str) -> None:
        """Raises BadInput where processes differ in a number."""
        maximum, negated_minimum = self.all_reduce_max(number, -number)
        if maximum != -negated_minimum:
            raise BadInput(
                f"process {self.rank} of {self.size} has {name} {number}, and others from {-negated_minimum} to "
                f"{maximum}; the run folder must be on a file system that all of them share"
            )

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients over all processes, in buckets."""
        if self.alone:
            return
        for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            _communicate(dist.all_reduce, flat)
            for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def from_main(self, tensor: Tensor) -> Tensor:
        """Returns the main process's tensor, of the same shape on all: what decides is computed once."""
        if self.alone:
            return tensor
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        _communicate(dist.broadcast, copy, src=0)
        return copy

    def broadcast(self, module: nn.Module) -> None:
        """Copies the main process's weights and buffers to all processes."""
        if self.alone:
            return
        for value in module.state_dict().values():
            if isinstance(value, Tensor):
                _communicate(dist.broadcast, value, src=0)

    def shard(self, rows: Tensor) -> Tensor:
        """Returns every size-th row from `rank` on: the shard of this process, so that all shards fill at once."""
        return rows[self.rank :: self.size]

    def unshard_order(self, count: int) -> Tensor:
        """Returns where each of `count` rows is in the concatenation of all shards."""
        place = torch.arange(count)
        return torch.cat([place[rank :: self.size] for rank in range(self.size)]).argsort()

    def gather_shards(self, share: Tensor) -> Tensor | None:
        """Returns the rows of all shards in their order on the main process, None on others."""
        if self.alone:
            return share
        shards = self._gather_parts(share, to_main=True)
        if not self.is_main:
            return None
        rows = share.new_empty(sum(map(len, shards)), *share.shape[1:])
        for rank, shard in enumerate(shards):
            rows[rank :: self.size] = shard
        return rows

    def gather_to_main(self, rows: Tensor) -> Tensor:
        """Returns the rows of all processes, concatenated, on the main process; on others their own."""
        if self.alone:
            return rows
        parts = self._gather_parts(rows, to_main=True)
        return torch.cat(parts) if self.is_main else rows

    def barrier(self) -> None:
        """Waits for all processes."""
        self.all_reduce_max(0)

    def _gather_parts(self, rows: Tensor, to_main: bool = False) -> list[Tensor]:
        """Returns the rows of each process; to_main: to the main one only, the others get none."""
        boxes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        _communicate(dist.all_gather, boxes, torch.tensor([len(rows)]))
        lengths = [int(box) for box in boxes]
        padded = torch.cat([rows.contiguous(), rows.new_zeros(max(lengths) - len(rows), *rows.shape[1:])])
        room = [torch.empty_like(padded) for _ in lengths] if self.is_main or not to_main else []
        if to_main:
            _communicate(dist.gather, padded, room or None, dst=0)
        else:
            _communicate(dist.all_gather, room, padded)
        return [part[:length] for part, length in zip(room, lengths, strict=False)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, world: World) -> Tensor:
        parts = world._gather_parts(rows.detach())
        first = sum(map(len, parts[: world.rank]))
        context.own = slice(first, first + len(rows))
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[context.own], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return _all_reduce(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _all_reduce(gradient)


def _all_reduce(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    _communicate(dist.all_reduce, total)
    return total


def _severity(failure: BadInput | Interrupted) -> int:
    if isinstance(failure, Interrupted):
        return _FULL + failure.signal_number
    return _FULL if isinstance(failure, FullDisk) else _BAD


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _communicate(collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Calls a collective; raises ProcessLost where another process is gone."""
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        # Gloo's errors have no class of their own.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise ProcessLost("another process of the run is gone") from error


@contextmanager
def init_process_group(world: World, device: torch.device) -> Iterator[World]:
    """Joins the process group of the run; does nothing for one process."""
    if world.alone:
        yield world
        return
    if device.type == "mps":
        raise BadInput(f"{world.size} processes cannot share an mps device; use --device cpu, or one process")
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise BadInput(
            f"{world.size} processes need a place to meet; start them by torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=_RENDEZVOUS_TIMEOUT))
        dist.init_process_group(
            backend,
            store=_fresh_store(store, world),
            rank=world.rank,
            world_size=world.size,
            timeout=_COLLECTIVE_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise BadInput(
            f"the processes did not meet at {place} ({first_line(error, 100)}); start them by torchrun"
        ) from None
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _fresh_store(store: Store, world: World) -> Store:
    """Returns a part of the rendezvous store that no earlier process has written to.

    torchrun's store outlives the processes that it restarts and still holds the addresses of dead ones. So the main
    process announces a new prefix to those that are here now, and waits until each of them has acknowledged it.
    """
    me, pause = uuid4().hex, 0.02
    store.set(f"here/{world.rank}", me)
    if world.is_main:
        name = uuid4().hex
        heard = [f"{name}/{rank}" for rank in range(1, world.size)]
        while not store.check(heard):
            ids = [store.get(f"here/{rank}").decode() for rank in range(world.size)]
            store.set("named", " ".join([name, *ids]))
            time.sleep(pause)
        return PrefixStore(name, store)
    while True:
        name, *ids = store.get("named").decode().split()
        if ids[world.rank : world.rank + 1] == [me]:
            store.set(f"{name}/{world.rank}", "heard")
            return PrefixStore(name, store)
        time.sleep(pause)
