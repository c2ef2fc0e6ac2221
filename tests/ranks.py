"""Several real processes that meet by gloo, for tests of what they compute together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked import Started

from cmsf.cli import main
from cmsf.data import Dataset, SupportSampler
from cmsf.data.transforms import WholeBatch
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.method.losses import SUPPORT
from cmsf.recipes.recipe import Recipe
from cmsf.training.resolve import resolve
from cmsf.utils.distributed import World, init_process_group


@dataclass(frozen=True)
class Ended:
    code: int
    said: str


def in_ranks(size: int, work: Callable[..., int | None], *given: Any) -> list[Ended]:
    """How each of so many processes ended that a launcher had started: by work(*given), in the order of their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    processes = [
        Started(work, *given, environment=meeting | sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    return [Ended(process.wait(), process.said()) for process in processes]


def train(ranks: int, *arguments: str | Path) -> list[Ended]:
    """How each process of `cmsf train` ended."""
    return in_ranks(ranks, main, training(*arguments))


def training(*arguments: str | Path) -> list[str]:
    return ["train", *map(str, arguments), "--threads", "1", "--device", "cpu"]


def together(size: int, work: Callable[..., Any], *given: Any, into: Path) -> list[Any]:
    """What each of so many processes makes of it: work(world, *given), in the order of their ranks."""
    for ended in in_ranks(size, _one, work, given, into):
        assert ended.code == 0, ended.said
    return [torch.load(into / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _one(work: Callable[..., Any], given: tuple[Any, ...], into: Path) -> None:
    torch.set_num_threads(1)
    with init_process_group(World.from_env(), torch.device("cpu")) as world:
        torch.save(work(world, *given), into / f"{world.rank}.pt")


def learn_each(world: World, jobs: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Several runs one after the other: to start processes takes longer than to train such small networks."""
    return {name: learn(world, *job) for name, job in jobs.items()}


def learn(world: World, recipe: Recipe, data: Dataset, steps: int, sharded: bool = False) -> dict[str, Any]:
    """So many steps of a recipe by the whole world, and all that came of them."""
    resolved = resolve(recipe, data, 12)
    learner = make_learner(resolved, data.train.label, "cpu", world=world, bank_sharded=sharded)
    size, losses = resolved.batch_size, []
    per_epoch = len(data.train) // size
    labelled = SupportSampler(data.train.label, resolved.support_classes, resolved.support_images, resolved.seed)
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        learner.encoders.freeze_backbone(epoch < resolved.freeze_epochs)
        if step and position in (0, per_epoch // 2):
            learner.supervision.refresh(lambda index: _clean(learner, data, index))
        order = data.train.order(resolved.seed, epoch)[position * size : (position + 1) * size]
        support = _share(world, data, resolved.seed, step, labelled(step)) if SUPPORT in learner.view_crops else None
        _, outcome = learner.step(_share(world, data, resolved.seed, epoch, order), 0.9, support)
        losses.append(float(outcome.loss.detach()))
    return {"encoders": learner.encoders.state_dict(), "bank": whole_bank(learner), "losses": losses}


def _share(world: World, data: Dataset, seed: int, epoch: int, index: torch.Tensor) -> WholeBatch:
    mine = index[world.chunk(len(index))]
    return WholeBatch(mine, seed, epoch, data.train.images[mine])


def whole_bank(learner: Learner) -> dict[str, Any]:
    return {name: value for name, value in learner.bank.full_state_dict().items() if value is not None}


def _clean(learner: Learner, data: Dataset, index: torch.Tensor) -> torch.Tensor:
    target = learner.encoders.target
    assert target is not None
    target.eval()
    found = learner.encoders.embed(data.train.images[index].double() / 255).embedding
    target.train()
    return found
