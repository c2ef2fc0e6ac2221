"""Validates a network before and while it trains: k-NN, what has changed, and the classifier trained along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from jaxtyping import Bool
from safetensors.torch import save_file
from torch import Tensor, nn

from cmsf.data import Dataset
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, can_evaluate, evaluate_knn
from cmsf.evaluation.metrics import Accuracy, Result, change_estimate
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.models.encoders import Encoders
from cmsf.models.state_dicts import read_safetensors
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs.folder import ALONG, RunFolder
from cmsf.utils.files import atomic_write, report_write_errors
from cmsf.utils.progress import progress_prefix

KNN = "20-nn"
"""The figure whose change since the start is told."""


class Validator:
    def __init__(
        self, recipe: ResolvedRecipe, encoders: Encoders, data: Dataset, device: torch.device, workers: int
    ) -> None:
        self.recipe, self.data = recipe, data
        self.backbone, self.head = encoders.online.backbone, encoders.classifier
        self.features = FeatureExtractor(self.backbone, Preprocessing.from_recipe(recipe), device, workers)
        self.start: Bool[Tensor, " n"] | None = None

    def is_due(self, epochs: int) -> bool:
        """Whether to validate after so many epochs."""
        every = self.recipe.evaluate_every
        return epochs == self.recipe.epochs or bool(every and epochs % every == 0)

    def validate_start(self) -> dict[str, float]:
        """Returns k-NN of the weights that training starts from, and remembers which test images were right."""
        if not can_evaluate(self.data):
            return {}
        with progress_prefix("the start"):
            result = evaluate_knn(self.features, self.data)
        self.start = _correct(result)
        return result.accuracy

    def save_start(self, file: Path) -> None:
        if self.start is not None:
            with report_write_errors(file), atomic_write(file) as temporary:
                save_file({KNN: self.start}, temporary)

    def load_start(self, file: Path) -> None:
        self.start = read_safetensors(file)[KNN]

    def validate(self) -> dict[str, float]:
        """Returns accuracies in per cent on the test images, by name, and by how much the main one has changed; none
        where no classes are known."""
        if not can_evaluate(self.data):
            return {}
        with progress_prefix("validation"):
            result = evaluate_knn(self.features, self.data)
            figures = result.accuracy | self._classifier()
        if self.start is not None:
            change = change_estimate(self.start, _correct(result))
            names = (f"{KNN}_change", f"{KNN}_change_low", f"{KNN}_change_high")
            figures |= dict(zip(names, astuple(change), strict=True))
        groups = {"classifier_groups": len(self.data.label_names)} if self.data.groups else {}
        return figures | (groups if "classifier" in figures else {})

    def _classifier(self) -> dict[str, float]:
        """Returns the accuracy of the classifier that is trained along; empty where there is none."""
        held_out = EvaluationSet.of(self.data)
        if self.head is None or held_out is None:
            return {}
        network = nn.Sequential(self.backbone, self.head)
        return {"classifier": held_out.accuracy(predict_scores(network, held_out.split, self.features)).percent}

    def save_classifier(self, folder: RunFolder) -> None:
        if self.head is not None:
            about = {"classes": list(self.data.label_names), "tune": ALONG, "features": self.head.in_features}
            about |= {"head": "one linear layer, f → classes", "size": self.recipe.size}
            about |= self.features.protocol()
            folder.save_classifier(self.head, about)


def _correct(result: Result) -> Bool[Tensor, " n"]:
    """Returns which test images k-NN classified right."""
    measure = result.measures[KNN]
    assert isinstance(measure, Accuracy)
    return measure.correct


def describe_change(line: Mapping[str, float]) -> str:
    """Returns k-NN at the start and now, with the interval of the change, and what that says, in words."""
    now, (change, low, high) = line[KNN], (line[f"{KNN}_change{end}"] for end in ("", "_low", "_high"))
    verdict = "better than" if low > 0 else "worse than" if high < 0 else "not distinguishable from"
    interval = f"{change:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
    return f"20-NN {now - change:.2f} → {now:.2f} % ({interval}): {verdict} the start"
