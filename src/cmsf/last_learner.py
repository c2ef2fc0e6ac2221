"""The learner of a run's newest checkpoint, to look at: its bank, and what its objective looks for in there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cmsf.assembly import make_learner
from cmsf.data import Dataset
from cmsf.errors import BadInput
from cmsf.learner import Learner
from cmsf.recipe import Resolved
from cmsf.run_folder import RunFolder
from cmsf.saving import Saver


def last_learner(
    folder: RunFolder, recipe: Resolved, data: Dataset, device: torch.device, say: Callable[[str], None]
) -> Learner:
    """As it was when the run was saved last."""
    learner = make_learner(recipe, data.train.label, device)
    if not Saver(folder.checkpoints, recipe, learner).go_back(lambda progress: None, say):
        raise BadInput(f"{folder.checkpoints} has no checkpoint of this version")
    return learner
