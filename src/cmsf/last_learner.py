"""The learner of a run's newest checkpoint, to look at: its bank, and what its objective looks for in there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cmsf.assembly import make_learner
from cmsf.data import Dataset
from cmsf.learner import Learner
from cmsf.recipe import Resolved
from cmsf.run_folder import RunFolder
from cmsf.saving import Saver


def last_learner(
    folder: RunFolder, recipe: Resolved, data: Dataset, device: torch.device, say: Callable[[str], None]
) -> Learner | None:
    """As it was when the run was saved last; None where it never was."""
    learner = make_learner(recipe, data.train.label, device)
    return learner if Saver(folder.checkpoints, recipe, learner).go_back(lambda progress: None, say) else None
