"""Cross-entropy: a linear classifier on the features, trained along with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from cmsf.method.losses.base import SECOND, Loss, LossInput, LossOutput
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Name the class: L_i = −log softmax(W g(T2 x_i))_y. An image without a label is left out of the mean."""

    online = ((SECOND,),)
    heads = frozenset({"classifier"})
    learns_from_labels = True

    def __call__(self, step: LossInput) -> LossOutput:
        scores = step.online[SECOND].logits
        known = (step.label != UNKNOWN).sum()
        return LossOutput(cross_entropy(scores, step.label, ignore_index=UNKNOWN, reduction="sum") / known.clamp_min(1))
