"""Validates a network while it trains: k-NN, and the classifier that may be trained along."""

from __future__ import annotations

import torch
from torch import nn

from cmsf.data import Dataset
from cmsf.evaluation import FeatureExtractor, can_evaluate, evaluate_knn
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.models.encoders import Encoders
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs.folder import ALONG, RunFolder
from cmsf.utils.progress import progress_prefix


class Validator:
    def __init__(
        self, recipe: ResolvedRecipe, encoders: Encoders, data: Dataset, device: torch.device, workers: int
    ) -> None:
        self.recipe, self.data = recipe, data
        self.backbone, self.head = encoders.online.backbone, encoders.classifier
        self.features = FeatureExtractor(self.backbone, recipe.size, device, workers)

    def is_due(self, epochs: int) -> bool:
        """Whether to validate after so many epochs."""
        every = self.recipe.evaluate_every
        return can_evaluate(self.data) and (epochs == self.recipe.epochs or bool(every and epochs % every == 0))

    def validate(self) -> dict[str, float]:
        """Returns accuracies in per cent on the test images, by name."""
        with progress_prefix("validation"):
            figures = evaluate_knn(self.features, self.data).accuracy | self._classifier()
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
            folder.save_classifier(self.head, about)
