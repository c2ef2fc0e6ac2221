"""One training step of constrained mean shift, the paper's Section 2, or of another loss in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from cmsf.data.transforms import Augmentation, Batch, Crop
from cmsf.method.bank import MemoryBank
from cmsf.method.losses import SUPPORT, THIRD, Loss, LossInput, LossOutput, ViewGroup
from cmsf.method.rows import Rows
from cmsf.method.supervision import Supervision
from cmsf.models.encoders import EncoderOutput, Encoders
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput


class Diverged(BadInput):
    """The loss or a weight is NaN or inf; losses: the last loss and its parts."""

    def __init__(self, message: str, losses: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.losses = dict(losses or {})


@dataclass
class Learner:
    encoders: Encoders
    bank: MemoryBank
    supervision: Supervision
    loss_fn: Loss
    views: dict[int, Augmentation]
    """The augmentation of each view: T1 and T2 in the paper, and further views that the loss needs."""
    optimizer: Optimizer
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Scales the loss for fp16; disabled otherwise."""
    world: World = World()
    """The processes that train together. Encoder outputs are gathered: each then has the whole batch."""
    shuffle_batchnorm: bool = False
    """Whether the target sees other shares of a batch than the online encoder (MoCo's shuffling BN): statistics of the
    same share would tell one encoder what the other has seen."""

    @property
    def view_crops(self) -> dict[int, Crop]:
        """Returns the crop of each view that a step needs, for a loader that crops beforehand."""
        needed = {view for group in (*self.loss_fn.target, *self.loss_fn.online) for view in group}
        if self.supervision.needs_third_view:
            needed.add(THIRD)
        return {view: self.views[view].crop for view in sorted(needed)}

    def step(self, batch: Batch, target_momentum: float, support: Batch | None = None) -> tuple[Rows, LossOutput]:
        """Takes one optimizer step on a batch (this process's share of it), with labelled images beside it if needed.

        Returns the queries as they entered the bank, and the loss with its parts.
        """
        images = dict.fromkeys(self.views, batch) | ({} if support is None else {SUPPORT: support})
        target = self._forward(self._embed, self.loss_fn.target, images)  # u = f(T1 x), no gradient
        online = self._forward(self.encoders.encode, self.loss_fn.online, images)  # v = h(g(T2 x))
        first = next(view for view in (*target, *online) if view != SUPPORT)
        query = self._make_rows((online | target)[first], batch)

        if self.loss_fn.bank == "before":  # so that u itself is a candidate
            self.bank.enqueue(query)
        labelled = None if support is None else self._make_rows(online[SUPPORT], support)
        output = self.loss_fn(LossInput(query, self.bank, online, target, labelled))
        self.optimizer_step(output)
        if self.loss_fn.bank == "after":
            self.bank.enqueue(query)
        self.encoders.update_ema(target_momentum)
        return query, output

    def _forward(
        self, encode: Callable[[Tensor], EncoderOutput], groups: tuple[ViewGroup, ...], images: dict[int, Batch]
    ) -> dict[int, EncoderOutput]:
        """Encodes each view; the views of a group go through the encoder as one batch."""
        encoded: dict[int, EncoderOutput] = {}
        for group in groups:
            views = [self.views[view](images[view], view) for view in group]
            whole = encode(views[0] if len(views) == 1 else torch.cat(views))
            parts = whole.split([len(view) for view in views])
            encoded |= {view: part.gather(self.world) for view, part in zip(group, parts, strict=True)}
        return encoded

    def _embed(self, images: Float[Tensor, "b 3 h w"]) -> EncoderOutput:
        """Returns the target's embeddings of this process's share of a batch."""
        if not self.shuffle_batchnorm:
            return self.encoders.embed(images)
        batch = self.world.gather(images)
        shuffled = self.encoders.embed(self.world.shard(batch)).gather(self.world)
        return shuffled[self.world.unshard_order(len(batch))[self.world.chunk(len(batch))]]

    def _make_rows(self, encoded: EncoderOutput, batch: Batch) -> Rows:
        """Returns rows of these images, with labels or companions filled in by the supervision."""
        embedding = encoded.embedding.detach()
        rows = Rows(embedding, self.world.gather(batch.index.to(embedding.device)))
        return self.supervision(rows, lambda: self._forward(self._embed, ((THIRD,),), {THIRD: batch})[THIRD].embedding)

    def optimizer_step(self, output: LossOutput) -> None:
        loss = output.loss
        if not loss.isfinite():  # the weights are still those of before
            raise Diverged(f"the loss is {float(loss.detach())}", output.scalars())
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.world.all_reduce_gradients(self.encoders.trainable_parameters())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged("the gradients are NaN or inf at any scale", output.scalars())
