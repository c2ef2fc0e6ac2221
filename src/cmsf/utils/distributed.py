"""Several processes that compute what one would: the only file that speaks to torch.distributed.

Every process holds an equal share of each batch, in the order of their ranks. What they made of it is gathered, so each
computes the loss of the whole batch; each sends the gradient back through its own share, and these add up.
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

_PATIENCE = timedelta(hours=12)
"""How long one may wait for another, who may be judging a network by a million images; gloo notices a dead one."""
_MEETING = timedelta(minutes=30)
"""How long they may take to start."""
_BUCKET = 2**25
"""How many gradients travel at a time: 128 MB of float32."""


_BAD, _FULL = 1, 2
"""What has stopped a process, as a number; above them, signals."""
_GONE = "another process of the run is gone"


class FullDiskElsewhere(FullDisk, FailedElsewhere):
    """The process that writes has no room for it."""


class ProcessLost(Exception):
    """Another process of the run is gone."""


@dataclass(frozen=True)
class World:
    """This process among those that train together; alone, it gathers what is there already.

    local_rank and local_size: the same among those on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Reads rank and world size from the variables that torchrun, or Slurm's srun, has set."""
        names = (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            # Of a step: a batch script that starts one process has the numbers of the whole job too.
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        )
        for rank, size, local_rank, local_size in names:
            if rank in environment and size in environment:
                of_node = (
                    environment.get(local_size, "1").split("(")[0].split(",")[0]
                )  # Slurm has 4(x2) for two times four
                try:
                    world = cls(
                        int(environment[rank]),
                        int(environment[size]),
                        int(environment.get(local_rank, "0")),
                        int(of_node),
                    )
                except ValueError:
                    raise BadInput(
                        f"{rank} {environment[rank]} and {size} {environment[size]} are not numbers of processes; "
                        "start them by torchrun, or unset these variables"
                    ) from None
                if not 0 <= world.rank < world.size:
                    raise BadInput(
                        f"{rank} {world.rank} is not one of {size} {world.size}; start the processes by torchrun"
                    )
                if not world.alone:
                    return world
        return cls()

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def chunk(self, count: int) -> slice:
        """This process's share of so many things; shares differ by one at most."""
        return _share(count, self.rank, self.size)

    def gather(self, rows: Tensor) -> Tensor:
        """Everybody's rows, in the order of the ranks; the gradient goes back to one's own alone.

        That is right where everybody computes the same of them, and what comes of it is added up later.
        """
        if self.alone:
            return rows
        gathered: Tensor = _Gather.apply(rows, self)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; the gradient too is everybody's."""
        if self.alone:
            return tensor
        total: Tensor = _Sum.apply(tensor)
        return total

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        """The largest of everybody's numbers, one by one."""
        if self.alone:
            return numbers
        box = torch.tensor([int(number) for number in numbers])
        with _noticing_a_loss():
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return tuple(box.tolist())

    def fail_together(self, work: Callable[[], T]) -> T:
        """Do what may fail or be interrupted in one process alone: then all of them stop at the same place."""
        trouble: BadInput | Interrupted | None = None
        try:
            done = work()
        except (BadInput, Interrupted) as error:
            trouble = error
        # Of those in the worst trouble, the first one says what it is.
        mine = _gravity(trouble) * self.size + self.size - 1 - self.rank if trouble is not None else 0
        (worst,) = self.all_reduce_max(mine)
        kind = worst // self.size
        if trouble is not None and mine == worst:
            raise trouble
        if kind > _FULL:
            raise Interrupted(kind - _FULL)
        if worst:
            raise (FullDiskElsewhere if kind == _FULL else FailedElsewhere)(
                "another process of the run has stopped, and says why"
            )
        return done

    def check_same(self, number: int, what: str) -> None:
        """Refuse to go on where processes differ in a number."""
        most, least = self.all_reduce_max(number, -number)
        if most != -least:
            raise BadInput(
                f"process {self.rank} of {self.size} has {what} {number}, and others from {-least} to {most}; the run "
                "folder must be on a file system that all of them share"
            )

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up what everybody's share of the batch asks for."""
        if self.alone:
            return
        for some in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in some])
            with _noticing_a_loss():
                dist.all_reduce(flat)
            for gradient, total in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def broadcast(self, module: nn.Module) -> None:
        """Make a module's weights and buffers those of the first process."""
        if self.alone:
            return
        for value in module.state_dict().values():
            if isinstance(value, Tensor):
                with _noticing_a_loss():
                    dist.broadcast(value, src=0)

    def shard(self, whole: Tensor) -> Tensor:
        """This process's share of rows that are dealt out one by one, so that all shares fill at once."""
        return whole[self.rank :: self.size]

    def unshard_order(self, count: int) -> Tensor:
        """Where each of so many things is, once all shares of them lie one behind the other."""
        place = torch.arange(count)
        return torch.cat([place[rank :: self.size] for rank in range(self.size)]).argsort()

    def gather_shards(self, share: Tensor) -> Tensor | None:
        """The rows that were dealt out, in their order, for the first process; for others None."""
        if self.alone:
            return share
        room, lengths = self._at_first(share)
        return torch.stack(room, dim=1).flatten(0, 1)[: sum(lengths)] if self.is_main else None

    def gather_to_main(self, rows: Tensor) -> Tensor:
        """Everybody's rows, one behind the other, for the first process; for others their own."""
        if self.alone:
            return rows
        room, lengths = self._at_first(rows)
        return torch.cat([some[:length] for some, length in zip(room, lengths, strict=True)]) if self.is_main else rows

    def barrier(self) -> None:
        """Until everybody is here."""
        self.all_reduce_max(0)

    def _lengths(self, rows: Tensor) -> list[int]:
        boxes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        with _noticing_a_loss():
            dist.all_gather(boxes, torch.tensor([len(rows)]))
        return [int(box) for box in boxes]

    def _at_first(self, rows: Tensor) -> tuple[list[Tensor], list[int]]:
        lengths = self._lengths(rows)
        room = [rows.new_empty(max(lengths), *rows.shape[1:]) for _ in lengths] if self.is_main else []
        with _noticing_a_loss():
            dist.gather(_padded(rows, max(lengths)), room or None, dst=0)
        return room, lengths

    def _gathered(self, rows: Tensor) -> tuple[Tensor, slice]:
        lengths = self._lengths(rows)
        room = [rows.new_empty(max(lengths), *rows.shape[1:]) for _ in lengths]
        with _noticing_a_loss():
            dist.all_gather(room, _padded(rows, max(lengths)))
        first = sum(lengths[: self.rank])
        whole = torch.cat([some[:length] for some, length in zip(room, lengths, strict=True)])
        return whole, slice(first, first + len(rows))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, world: World) -> Tensor:
        gathered, context.own = world._gathered(rows.detach().contiguous())
        return gathered

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[context.own], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return _added_up(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _added_up(gradient)


def _added_up(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    with _noticing_a_loss():
        dist.all_reduce(total)
    return total


def _gravity(trouble: BadInput | Interrupted | None) -> int:
    if isinstance(trouble, Interrupted):
        return _FULL + trouble.signal_number
    return 0 if trouble is None else _FULL if isinstance(trouble, FullDisk) else _BAD


def _share(count: int, rank: int, size: int) -> slice:
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return slice(first, first + each + (rank < more))


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    for gradient in gradients:
        if some and sum(map(Tensor.numel, some)) + gradient.numel() > _BUCKET:
            yield some
            some = []
        some.append(gradient)
    if some:
        yield some


@contextmanager
def _noticing_a_loss() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise ProcessLost(_GONE) from error
    except RuntimeError as error:  # gloo's own, which has no class of its own
        if "gloo" not in str(error).lower():
            raise
        raise ProcessLost(_GONE) from error


@contextmanager
def init_process_group(world: World, device: torch.device) -> Iterator[World]:
    """Meet the others; where there are none, nothing happens."""
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
    with _met():
        meeting = next(rendezvous("env://", world.rank, world.size, timeout=_MEETING))[0]
        store = _of_the_living(meeting, world)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_PATIENCE)
    try:
        yield world
    finally:
        dist.destroy_process_group()


@contextmanager
def _met() -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise BadInput(
            f"the processes did not meet at {place} ({first_line(error, 100)}); start them by torchrun"
        ) from None


def _of_the_living(store: Store, world: World) -> Store:
    """A part of the meeting place that nobody has written to before.

    torchrun's outlives the processes that it starts again, and where a dead one could be reached still stands in it. So
    the first process names a part of it to those who are here now, and waits until each of them has heard it.
    """
    me, pause = uuid4().hex, 0.02
    store.set(f"here/{world.rank}", me)
    if world.is_main:
        name = uuid4().hex
        heard = [f"{name}/{rank}" for rank in range(1, world.size)]
        while not store.check(heard):
            here = [store.get(f"here/{rank}").decode() for rank in range(world.size)]
            store.set("named", " ".join([name, *here]))
            time.sleep(pause)
        return PrefixStore(name, store)
    while True:
        name, *here = store.get("named").decode().split()
        if here[world.rank : world.rank + 1] == [me]:
            store.set(f"{name}/{world.rank}", "heard")
            return PrefixStore(name, store)
        time.sleep(pause)
