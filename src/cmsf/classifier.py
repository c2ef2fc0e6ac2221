"""A classifier on the disk: a run that also says what is on an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.classifier_folder import ClassifierFolder
from cmsf.run import Run


class Classifier(Run):
    """What cmsf finetune wrote; all that works with a run works with it too."""

    folder: ClassifierFolder

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.folder = ClassifierFolder(self.folder.path)
        self.about: dict[str, Any] = self.folder.about()
        """Classes, and how they were learned, round by round."""

    @property
    def classes(self) -> tuple[str, ...]:
        """What the places of its scores are called."""
        return tuple(self.about["classes"])

    def network(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Backbone and head in eval mode: images in, a score a class out."""
        return self.folder.load_network(device)
