"""Compute of training, counted as the paper does (supplement, equation of total passes and FLOPs).

Only the backbone counts, a multiply-add is one operation, and a backward pass costs twice a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPERS_PASS = 3.9e9
"""Multiply-adds of ResNet-50 for an image of 224 px, by the paper: of the original network (3.86e9). The usual one
today, ours too, has the stride of a block in its 3×3 convolution instead of the 1×1 before it, and 4.09e9."""
PAPERS_SIDE = 224


def share_of_pass(pixels: int, whole: int = PAPERS_SIDE) -> float:
    """Returns the passes that a square crop of K pixels counts: (K / 224)²."""
    return (pixels / whole) ** 2


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of each image of a step, and the number of images."""

    forward: float = 0
    backward: float = 0
    batch: int = 0

    @property
    def of_batch(self) -> float:
        return (self.forward + self.backward) * self.batch


@dataclass(frozen=True)
class Compute:
    """Compute of so many iterations; a pass is that of one image of full size, in one direction.

    labelled: of the labelled images that a loss asks for beside the batch. per_pass: multiply-adds of a forward pass.
    """

    unlabelled: Passes
    iterations: int
    labelled: Passes = Passes()
    per_pass: float = PAPERS_PASS

    @property
    def mini_batch(self) -> float:
        """Passes of a step, forward and backward."""
        return self.unlabelled.of_batch + self.labelled.of_batch

    @property
    def forward_passes(self) -> float:
        return sum(passes.forward * passes.batch for passes in (self.unlabelled, self.labelled)) * self.iterations

    @property
    def backward_passes(self) -> float:
        return sum(passes.backward * passes.batch for passes in (self.unlabelled, self.labelled)) * self.iterations

    @property
    def passes(self) -> float:
        """Forward and backward passes of the whole training."""
        return self.forward_passes + self.backward_passes

    @property
    def flops(self) -> float:
        return (self.forward_passes + 2 * self.backward_passes) * self.per_pass
