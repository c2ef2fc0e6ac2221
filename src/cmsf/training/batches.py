"""Yields the training batches, in a seeded order, with labelled images beside them where a loss needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.data import Dataset, SupportSampler, load_batches
from cmsf.data.transforms import Batch, Crop
from cmsf.method.losses import SUPPORT
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput


class TrainingBatches:
    """Draws the batches of a run, from any step on; of several processes, each reads its share."""

    def __init__(self, recipe: ResolvedRecipe, data: Dataset, world: World) -> None:
        self.recipe, self.images, self.world = recipe, data.train, world
        self.steps_per_epoch = len(data.train) // recipe.batch_size  # the last incomplete batch is dropped
        self.total = self.steps_per_epoch * recipe.epochs

    def batches(
        self, step: int, crops: Mapping[int, Crop], device: torch.device, workers: int, warn: Callable[[str], None]
    ) -> Iterator[tuple[Batch, Batch | None]]:
        """Yields the batches from `step` on; an image that one process cannot read stops all at the same step."""
        crops, support = dict(crops), cast(Iterator[Batch | None], repeat(None))
        read = partial(load_batches, self.images, seed=self.recipe.seed, device=device, workers=workers, warn=warn)
        if SUPPORT in crops:
            support = read(
                self.world.raise_on_all_ranks(lambda: self._support_plan(step)), {SUPPORT: crops.pop(SUPPORT)}
            )
        pairs = zip(read(self._plan(step), crops), support, strict=False)
        for _ in range(step, self.total):
            yield self.world.raise_on_all_ranks(lambda: next(pairs))

    def _plan(self, first: int) -> Iterator[tuple[int, Int[Tensor, " b"]]]:
        """Yields the epoch and this process's share of the images of every step."""
        size, epoch, order = self.recipe.batch_size, -1, None
        for step in range(first, self.total):
            now, position = divmod(step, self.steps_per_epoch)
            if order is None or now != epoch:
                epoch, order = now, self.images.order(self.recipe.seed, now)
            yield epoch, order[position * size : (position + 1) * size][self.world.chunk(size)]

    def _support_plan(self, first: int) -> Iterator[tuple[int, Int[Tensor, " s"]]]:
        """Yields the labelled images of every step; the step stands for the epoch, so no view comes twice."""
        recipe = self.recipe
        support = SupportSampler(self.images.label, recipe.support_classes, recipe.support_images, recipe.seed)
        count = len(support(0))
        if count < self.world.size:
            raise BadInput(
                f"{count} labelled images beside a batch are fewer than {self.world.size} processes; "
                f"use at most {count} processes"
            )
        drawn = ((step, support(step)) for step in range(first, self.total))
        return ((step, index[self.world.chunk(len(index))]) for step, index in drawn)
