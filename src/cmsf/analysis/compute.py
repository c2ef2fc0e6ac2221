"""What training costs, counted as the paper counts it (supplement, equation of total passes and FLOPs).

Only the backbone counts, a multiply-add is one operation, and going backward through the network costs twice as much as
going forward.
"""

from __future__ import annotations

from dataclasses import dataclass

PAPERS_PASS = 3.9e9
"""Multiply-adds of ResNet-50 for an image of 224 px, as the paper has it.

It is the original network (3.86e9). The one that everybody trains today, ours too, has the stride of a block in its 3×3
convolution instead of the 1×1 before it, and so 4.09e9.
"""
PAPERS_SIDE = 224


def share_of_pass(pixels: int, whole: int = PAPERS_SIDE) -> float:
    """What a square crop counts beside a whole view: (K / 224)²."""
    return (pixels / whole) ** 2


@dataclass(frozen=True)
class Passes:
    """How often an image of a step goes through the backbone, forward and backward, and how many there are."""

    forward: float = 0
    backward: float = 0
    batch: int = 0

    @property
    def of_batch(self) -> float:
        return (self.forward + self.backward) * self.batch


@dataclass(frozen=True)
class Compute:
    """Training of so many iterations; a pass in either direction is one of an image of full size."""

    unlabelled: Passes
    iterations: int
    labelled: Passes = Passes()
    """Those beside the batch that an objective asks for because they are labelled."""
    per_pass: float = PAPERS_PASS
    """Multiply-adds of a forward pass."""

    @property
    def mini_batch(self) -> float:
        """Passes of a step, in both directions."""
        return self.unlabelled.of_batch + self.labelled.of_batch

    @property
    def forward_passes(self) -> float:
        return sum(part.forward * part.batch for part in (self.unlabelled, self.labelled)) * self.iterations

    @property
    def backward_passes(self) -> float:
        return sum(part.backward * part.batch for part in (self.unlabelled, self.labelled)) * self.iterations

    @property
    def passes(self) -> float:
        """In both directions, of the whole training."""
        return self.forward_passes + self.backward_passes

    @property
    def flops(self) -> float:
        return (self.forward_passes + 2 * self.backward_passes) * self.per_pass
