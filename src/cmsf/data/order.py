"""The order in which an epoch goes through the images."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.randomness import permutation

_OPEN_BLOCKS = 8


def epoch_order(blocks: Int[Tensor, " n"] | None, count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    """All images at random; where they lie in blocks, at random among a few blocks at a time, the blocks at random.

    It depends on the seed and the epoch alone, so a run can be taken up at any step.
    """
    order = permutation(count, seed, epoch)
    if blocks is None:
        return order
    turn = permutation(int(blocks.max()) + 1, seed, epoch, _OPEN_BLOCKS)
    window = torch.empty_like(turn)
    window[turn] = torch.arange(len(turn)) // _OPEN_BLOCKS
    return order[window[blocks[order]].argsort(stable=True)]
