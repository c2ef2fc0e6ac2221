"""Share and accuracy of pseudo-labels.

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
    """Counts the images, the confident ones, those with a known class, the correct ones, and both of the confident.

    truth: each image's true class by the numbers of labels.
    """
    true, confident = truth[guess.index], guess.confident
    known = (guess.label != UNKNOWN) & (true != UNKNOWN)
    correct = known & (guess.label == true)
    masks = [torch.ones_like(confident), confident, known, correct, known & confident, correct & confident]
    return torch.stack([mask.sum() for mask in masks])


def summarise_guesses(counts: Int[Tensor, " counts"]) -> dict[str, float]:
    """Returns shares from the counts of one batch, or from their sum over many; NaN where the whole is empty."""
    images, confident, known, correct, known_confident, correct_confident = counts.tolist()
    shares = {
        "pseudo_share": (confident, images),
        "pseudo_accuracy_confident": (correct_confident, known_confident),
        "pseudo_accuracy_all": (correct, known),
    }
    return {name: part / whole if whole else math.nan for name, (part, whole) in shares.items()}
