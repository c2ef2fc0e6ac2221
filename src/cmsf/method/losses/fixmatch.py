"""FixMatch: name distorted images as one would the plain ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from cmsf.method.losses.base import FIRST, SECOND, SUPPORT, Loss, LossInput, LossOutput
from cmsf.method.supervision import PseudoLabelOutput
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class FixMatch(Loss):
    """Pseudo-labels of weak views for strong ones (Sohn et al. 2020, eq. 3 and 4): with q = p(T1 x), held still,

        L = H(y, p(T1 x_labelled)) + λ · mean over the batch of [max q ≥ threshold] H(argmax q, p(T2 x))

    The labelled images come beside the batch, which is of all images, labelled or not. T2 is RandAugment with cutout.
    All go through the network as one batch.
    """

    threshold: float
    unlabelled_weight: float

    online = ((SUPPORT, FIRST, SECOND),)
    heads = frozenset({"classifier"})
    learns_from_labels = True

    def __call__(self, step: LossInput) -> LossOutput:
        named, weak, strong = (step.online[view].logits for view in (SUPPORT, FIRST, SECOND))
        labelled = cross_entropy(named, step.support_label)
        confidence, label = weak.detach().softmax(1).max(1)
        confident = confidence >= self.threshold
        unlabelled = (cross_entropy(strong, label, reduction="none") * confident).mean()
        parts = {"labelled": labelled, "unlabelled": unlabelled}
        without = step.label == UNKNOWN
        guess = PseudoLabelOutput(step.query.index[without], label[without], confident[without])
        return LossOutput(labelled + self.unlabelled_weight * unlabelled, parts, pseudo_labels=guess)
