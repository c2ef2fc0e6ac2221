"""What a classifier leaves on the disk beside what every run does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cmsf.data.sources.table import write_csv
from cmsf.evaluation.finetune import FINE_TUNE_MODES, make_head
from cmsf.method.build import make_loss
from cmsf.models.backbones import feature_width
from cmsf.models.weights import load_strict, read_safetensors, save_weights
from cmsf.runs.folder import RunFolder
from cmsf.utils.errors import BadInput
from cmsf.utils.files import read_json, write_text
from cmsf.utils.text import is_encodable

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
            if "classifier" in make_loss(recipe).heads:
                raise BadInput(f"{self.path} is not finished; give the same cmsf train command again to finish it")
            raise BadInput(f"{self.path} is no classifier; make one: cmsf finetune {self.path}")
        damaged = BadInput(f"{self.classifier_file} is not what cmsf wrote")
        about = read_json(self.classifier_file)
        if not isinstance(about, dict):
            raise damaged
        classes, width, tune = about.get("classes"), about.get("features"), about.get("tune")
        named = isinstance(classes, list) and len(classes) > 1 and all(map(_is_name, classes))
        if not named or type(width) is not int or not 0 < width < 2**20 or tune not in (*FINE_TUNE_MODES, ALONG):
            raise damaged
        return dict(about)

    def save_about(self, about: dict[str, Any]) -> None:
        write_text(self.classifier_file, json.dumps(about, indent=2, ensure_ascii=False) + "\n")

    def save_head(self, head: nn.Module) -> None:
        save_weights(head, self.head_file)

    def load_network(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Images in, a score a class out; in eval mode."""
        about = self.about()
        width, classes = about["features"], len(about["classes"])
        backbone = self.load_backbone()
        features = feature_width(backbone, self.recipe().backbone, self.recipe().size)
        if width != features:  # before a head of such a width takes memory
            raise BadInput(f"{self.classifier_file} is for {width} features, and the network has {features}")
        head = nn.Linear(width, classes) if about["tune"] == ALONG else make_head(width, classes, mode=about["tune"])
        state = read_safetensors(self.head_file)
        head.to(next(backbone.parameters()).dtype)
        load_strict(head, state, self.head_file)
        return nn.Sequential(backbone, head).to(device).eval()

    def save_confusion(self, counts: Tensor, names: Sequence[str]) -> None:
        """A row a true class, a column a predicted one."""
        rows = [(name, *map(str, row)) for name, row in zip(names, counts.tolist(), strict=True)]
        write_csv(self.confusion_file, ("true \\ predicted", *names), rows)


def _is_name(name: Any) -> bool:
    """Text that can be written; JSON can spell halves of letters."""
    return isinstance(name, str) and is_encodable(name)
