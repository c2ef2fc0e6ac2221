"""Several real processes that meet by gloo, for tests of what they compute together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from cmsf.assembly import make_learner
from cmsf.data import Dataset
from cmsf.distributed import World, joined
from cmsf.learner import Learner
from cmsf.recipe import Recipe
from cmsf.resolving import resolve
from cmsf.views import WholeBatch


def together(size: int, work: Callable[..., Any], *given: Any, into: Path) -> list[Any]:
    """What each of so many processes makes of it: work(world, *given), in the order of their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_one, (size, port, work, given, into), nprocs=size)
    return [torch.load(into / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _one(rank: int, size: int, port: int, work: Callable[..., Any], given: tuple[Any, ...], into: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(World(rank, size), torch.device("cpu")) as world:
        torch.save(work(world, *given), into / f"{rank}.pt")


def learn_each(world: World, jobs: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Several runs one after the other: to start processes takes longer than to train such small networks."""
    return {name: learn(world, *job) for name, job in jobs.items()}


def learn(world: World, recipe: Recipe, data: Dataset, steps: int, sharded: bool = False) -> dict[str, Any]:
    """So many steps of a recipe, two epochs in all, by the whole world; and all that came of them."""
    resolved = resolve(recipe, data, 12)
    learner = make_learner(resolved, data.train.label, "cpu", world=world, bank_sharded=sharded)
    size, losses = resolved.batch_size, []
    per_epoch = len(data.train) // size
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        if step and position in (0, per_epoch // 2):
            learner.knowledge.refresh(lambda index: _clean(learner, data, index))
        index = data.train.order(resolved.seed, epoch)[position * size : (position + 1) * size][world.part(size)]
        batch = WholeBatch(index, resolved.seed, epoch, data.train.pictures[index])
        _, outcome = learner.step(batch, 0.9)
        losses.append(float(outcome.loss.detach()))
    return {"encoders": learner.encoders.state_dict(), "bank": whole_bank(learner), "losses": losses}


def whole_bank(learner: Learner) -> dict[str, Any]:
    return {name: value for name, value in learner.bank.whole_state().items() if value is not None}


def _clean(learner: Learner, data: Dataset, index: torch.Tensor) -> torch.Tensor:
    target = learner.encoders.target
    assert target is not None
    target.eval()
    found = learner.encoders.embed(data.train.pictures[index].double() / 255).embedding
    target.train()
    return found
