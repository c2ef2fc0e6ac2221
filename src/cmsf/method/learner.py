"""One step of constrained mean shift, the paper's Section 2, or of another objective in its place."""

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
from cmsf.method.losses import SUPPORT, THIRD, Loss, LossOutput, Step, ViewGroup
from cmsf.method.rows import Rows
from cmsf.method.supervision import Supervision
from cmsf.models.encoders import EncoderOutput, Encoders
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput


class Diverged(BadInput):
    """The loss, or a weight, is no number any more; losses: what the last loss was made of."""

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
    """How each view is made: T1 and T2 in the paper, and what else is asked for."""
    optimizer: Optimizer
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Keeps gradients of fp16 from vanishing; otherwise it does nothing."""
    world: World = World()
    """Who else trains it. What is encoded is gathered, so that everybody has the whole batch from there on."""
    shuffles: bool = False
    """Whether the target's shares of a batch are others than the online encoder's: BatchNorm of a share alone would
    tell one encoder what the other has seen."""

    @property
    def view_crops(self) -> dict[int, Crop]:
        """What each view of a step shows of an image, for those who cut it beforehand."""
        wanted = {view for together in (*self.loss_fn.target, *self.loss_fn.online) for view in together}
        if self.supervision.needs_third_view:
            wanted.add(THIRD)
        return {view: self.views[view].crop for view in sorted(wanted)}

    def step(self, batch: Batch, target_momentum: float, support: Batch | None = None) -> tuple[Rows, LossOutput]:
        """Learn from a batch (one's share of it), and from labelled images beside it where the objective asks for them.

        Returns the queries as they entered the bank, and what the objective said.
        """
        images = dict.fromkeys(self.views, batch) | ({} if support is None else {SUPPORT: support})
        target = self._pass(self._embed, self.loss_fn.target, images)  # u = f(T1 x), no gradient
        online = self._pass(self.encoders.encode, self.loss_fn.online, images)  # v = h(g(T2 x))
        first = next(view for view in (*target, *online) if view != SUPPORT)
        query = self._known((online | target)[first], batch)

        if self.loss_fn.bank == "before":  # so that u itself is a candidate
            self.bank.enqueue(query)
        labelled = None if support is None else self._known(online[SUPPORT], support)
        outcome = self.loss_fn(Step(query, self.bank, online, target, labelled))
        self.optimizer_step(outcome)
        if self.loss_fn.bank == "after":
            self.bank.enqueue(query)
        self.encoders.update_ema(target_momentum)
        return query, outcome

    def _pass(
        self, encode: Callable[[Tensor], EncoderOutput], passes: tuple[ViewGroup, ...], images: dict[int, Batch]
    ) -> dict[int, EncoderOutput]:
        """What an encoder makes of each view, one pass for those that go together."""
        encoded: dict[int, EncoderOutput] = {}
        for together in passes:
            views = [self.views[view](images[view], view) for view in together]
            whole = encode(views[0] if len(views) == 1 else torch.cat(views))
            parts = whole.split([len(view) for view in views])
            encoded |= {view: part.gather(self.world) for view, part in zip(together, parts, strict=True)}
        return encoded

    def _embed(self, images: Float[Tensor, "b 3 h w"]) -> EncoderOutput:
        """The target's embeddings of one's share of a batch."""
        if not self.shuffles:
            return self.encoders.embed(images)
        everyones = self.world.gather(images)
        mixed = self.encoders.embed(self.world.shard(everyones)).gather(self.world)
        return mixed[self.world.unshard_order(len(everyones))[self.world.chunk(len(everyones))]]

    def _known(self, encoded: EncoderOutput, batch: Batch) -> Rows:
        """Rows of these images with what is known of them."""
        embedding = encoded.embedding.detach()
        rows = Rows(embedding, self.world.gather(batch.index.to(embedding.device)))
        return self.supervision(rows, lambda: self._pass(self._embed, ((THIRD,),), {THIRD: batch})[THIRD].embedding)

    def optimizer_step(self, outcome: LossOutput) -> None:
        loss = outcome.loss
        if not loss.isfinite():  # the weights are still those of before
            raise Diverged(f"the loss is {float(loss.detach())}", outcome.scalars())
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.world.all_reduce_gradients(self.encoders.trainable_parameters())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged("the gradients are no numbers at any scale", outcome.scalars())
