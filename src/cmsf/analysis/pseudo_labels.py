"""How many images got a pseudo-label, and how many of those are right.

True classes are looked up by image index here alone, as in `neighbourhood`: no loss can see them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.method.supervision import PseudoLabelOutput
from cmsf.utils.constants import UNKNOWN


def count_guesses(guess: PseudoLabelOutput, truth: Int[Tensor, " n"]) -> Int[Tensor, " counts"]:
    """How many images there were, how many got a pseudo-label; of those guessed at all and of those that got one,
    how many can be judged and how many are right.

    truth: each image's true class by the numbers of labels.
    """
    true = truth[guess.index]
    judged = (guess.label != UNKNOWN) & (true != UNKNOWN)
    right = judged & (guess.label == true)
    sure = guess.confident
    kinds = [torch.ones_like(sure), sure, judged, right, judged & sure, right & sure]
    return torch.stack([kind.sum() for kind in kinds])


def summarise_guesses(counts: Int[Tensor, " counts"]) -> dict[str, float]:
    """Shares, of the counts of one batch or the sum of many; NaN where there is nothing to take a share of."""
    images, confident, judged, right, judged_confident, right_confident = counts.tolist()
    return {
        "pseudo_share": _share(confident, images),
        "pseudo_accuracy_confident": _share(right_confident, judged_confident),
        "pseudo_accuracy_all": _share(right, judged),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
