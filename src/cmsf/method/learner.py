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
from cmsf.method.losses import SECOND, SUPPORT, THIRD, Loss, LossInput, LossOutput, ViewGroup
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
    clip_grad: float = 0.0
    """The largest norm of the gradient; 0: any."""
    accumulate: int = 1
    """In how many parts a batch goes through the encoders."""

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
        if self.accumulate > 1:
            return self._step_in_parts(batch, target_momentum)
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

    def _step_in_parts(self, batch: Batch, target_momentum: float) -> tuple[Rows, LossOutput]:
        """Takes the same step with memory for a part of the batch, for a loss that is linear in the predictions.

        Its gradient with respect to them does not depend on them. So it comes first, from any others in their place,
        and each part goes backward as soon as it has gone forward.
        """
        parts: list[Batch] = list(batch.split(-(-len(batch.index) // self.accumulate)))
        (first,), *_ = self.loss_fn.target
        embedded = [self._embed(self.views[first](part, first)) for part in parts]
        query = self._make_rows(EncoderOutput.cat(embedded).gather(self.world), batch)
        self.bank.enqueue(query)

        anything = query.embedding.clone().requires_grad_()
        self.loss_fn(
            LossInput(query, self.bank, {SECOND: EncoderOutput(anything, anything, anything[:, :0])})
        ).loss.backward()
        assert anything.grad is not None
        slope = anything.grad[self.world.chunk(len(query))].split([len(part.index) for part in parts])

        self.optimizer.zero_grad(set_to_none=True)
        views = [view for group in self.loss_fn.online for view in group]
        outputs: dict[int, list[EncoderOutput]] = {view: [] for view in views}
        for part, its_slope in zip(parts, slope, strict=True):
            for group in self.loss_fn.online:
                whole = self.encoders.encode(torch.cat([self.views[view](part, view) for view in group]))
                for view, encoded in zip(group, whole.split([len(part.index)] * len(group)), strict=True):
                    outputs[view].append(encoded)
                pulled = sum((outputs[view][-1].prediction * its_slope).sum() for view in group) / len(views)
                self.scaler.scale(pulled).backward()
                for view in group:
                    outputs[view][-1] = outputs[view][-1].detach()
        online = {view: EncoderOutput.cat(found).gather(self.world) for view, found in outputs.items()}
        output = self.loss_fn(LossInput(query, self.bank, online))
        self._apply_gradients(output)
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
        self._check_finite(output)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(output.loss).backward()
        self._apply_gradients(output)

    def _check_finite(self, output: LossOutput) -> None:
        if not output.loss.isfinite():  # the weights are still those of before
            raise Diverged(f"the loss is {float(output.loss.detach())}", output.scalars())

    def _apply_gradients(self, output: LossOutput) -> None:
        self._check_finite(output)
        parameters = self.encoders.trainable_parameters()
        self.world.all_reduce_gradients(parameters)
        if self.clip_grad:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged("the gradients are NaN or inf at any scale", output.scalars())
