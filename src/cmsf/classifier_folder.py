"""What a classifier leaves on the disk beside what every run does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from cmsf.assembly import objective_of
from cmsf.data.lists import write_rows
from cmsf.errors import BadInput
from cmsf.evaluation.finetune import TUNES, new_head
from cmsf.files import write_text
from cmsf.run_folder import RunFolder
from cmsf.weights import fill, save

ALONG = "along"
"""How a classifier was made that was trained along with the features: one linear layer."""


@dataclass(frozen=True)
class ClassifierFolder(RunFolder):
    @property
    def head_file(self) -> Path:
        return self.path / "head.safetensors"

    @property
    def classifier_file(self) -> Path:
        """Classes, and how they were learned."""
        return self.path / "classifier.json"

    @property
    def confusion_file(self) -> Path:
        return self.path / "confusion.csv"

    @property
    def confusion_picture(self) -> Path:
        return self.path / "confusion.png"

    @property
    def calibration_picture(self) -> Path:
        return self.path / "calibration.png"

    def about(self) -> dict[str, Any]:
        """What classifier.json says."""
        recipe = self.recipe()  # says so where there is no run at all
        if not self.classifier_file.exists():
            if "classifier" in objective_of(recipe).heads:
                raise BadInput(f"{self.path} is not finished; give the same cmsf train command again to finish it")
            raise BadInput(f"{self.path} is no classifier; make one: cmsf finetune {self.path}")
        damaged = BadInput(f"{self.classifier_file} is not what cmsf wrote")
        try:
            about = json.loads(self.classifier_file.read_text(encoding="utf-8"))
            classes, width, tune = about["classes"], about["features"], about["tune"]
        except (OSError, ValueError, KeyError, TypeError):
            raise damaged from None
        named = isinstance(classes, list) and len(classes) > 1 and all(isinstance(name, str) for name in classes)
        if not named or type(width) is not int or not 0 < width < 2**20 or tune not in (*TUNES, ALONG):
            raise damaged
        return dict(about)

    def save_about(self, about: dict[str, Any]) -> None:
        write_text(self.classifier_file, json.dumps(about, indent=2, ensure_ascii=False) + "\n")

    def save_head(self, head: nn.Module) -> None:
        save(head, self.head_file)

    def load_network(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Images in, a score a class out; in eval mode."""
        about = self.about()
        width, classes = about["features"], len(about["classes"])
        head = nn.Linear(width, classes) if about["tune"] == ALONG else new_head(width, classes, tune=about["tune"])
        try:
            state = safetensors.torch.load_file(self.head_file)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"cannot read {self.head_file}: {str(error).splitlines()[0]}") from None
        backbone = self.load_backbone()
        head.to(next(backbone.parameters()).dtype)
        fill(head, state, self.head_file)
        return nn.Sequential(backbone, head).to(device).eval()

    def save_confusion(self, counts: Tensor, names: Sequence[str]) -> None:
        """A row a true class, a column a predicted one."""
        rows = [(name, *map(str, row)) for name, row in zip(names, counts.tolist(), strict=True)]
        write_rows(self.confusion_file, ("true \\ predicted", *names), rows)
