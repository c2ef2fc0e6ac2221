"""A prototype of every class out of the bank: ProtoNW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.nn.functional import cross_entropy, normalize

from cmsf.method.losses.base import FIRST, SECOND, LoggedSearch, Loss, LossInput, LossOutput
from cmsf.utils.constants import UNKNOWN


@dataclass(frozen=True)
class Prototypes(Loss):
    """Tell one's own class's mean from those of the others (the paper's supplement; after Snell et al. 2017, eq. 2):

        L_i = −log exp(v_i·c_y/τ) / Σ_k exp(v_i·c_k/τ),    c_k = the direction of the mean of class k's rows

    It is top-all mean shift with a contrast between classes. A class without a row has no prototype; an image without
    a label, or whose class has no prototype, is left out of the mean.
    """

    temperature: float

    online = ((SECOND,),)
    target = ((FIRST,),)
    heads = frozenset({"projector", "predictor"})
    bank: ClassVar[Literal["before"]] = "before"
    learns_from_labels = True
    logged_search = LoggedSearch()

    def __call__(self, step: LossInput) -> LossOutput:
        prediction = step.online[SECOND].prediction
        assert step.rows.label is not None
        rows = step.rows[step.rows.exists & (step.rows.label != UNKNOWN)]
        assert rows.label is not None
        classes, member = rows.label.unique(return_inverse=True)
        total = rows.embedding.new_zeros(len(classes), rows.embedding.shape[1]).index_add_(0, member, rows.embedding)
        scores = prediction @ normalize(total, dim=1).T / self.temperature
        image, own = (step.label[:, None] == classes).nonzero(as_tuple=True)  # no class is UNKNOWN
        return LossOutput(cross_entropy(scores[image], own, reduction="sum") / max(1, len(image)))
