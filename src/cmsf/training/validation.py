"""Validates a network before and while it trains: k-NN, what has changed, and the classifier trained along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from jaxtyping import Bool
from safetensors.torch import save_file
from torch import Tensor, nn

from cmsf.analysis.view_agreement import FEWEST, ViewAgreement
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
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, report_write_errors
from cmsf.utils.progress import progress_prefix

KNN, AGREEMENT = "20-nn", "view_agreement"
"""The figure whose change since the start is told, and the one in its place where no labels measure k-NN."""
_WORDS = {KNN: "20-NN", AGREEMENT: "agreement of views"}
_INTERVAL = ("_change", "_change_low", "_change_high")


class Validator:
    def __init__(
        self,
        recipe: ResolvedRecipe,
        encoders: Encoders,
        data: Dataset,
        device: torch.device,
        workers: int,
        judged: bool = False,
    ) -> None:
        """judged: whether epochs are judged by labels or views anyway, so that nothing need stand in for k-NN."""
        self.recipe, self.data = recipe, data
        self.backbone, self.head = encoders.online.backbone, encoders.classifier
        self.features = FeatureExtractor(self.backbone, Preprocessing.from_recipe(recipe), device, workers)
        enough = len(data.train) >= FEWEST and not judged and not can_evaluate(data)
        self.agreement = ViewAgreement.of(data.train, recipe.seed) if enough else None
        self.start: dict[str, Tensor] = {}
        """The main figure of each test image, or of each that agrees with itself, before the first step."""

    def is_due(self, epochs: int) -> bool:
        """Whether to validate after so many epochs."""
        every = self.recipe.evaluate_every
        return epochs == self.recipe.epochs or bool(every and epochs % every == 0)

    def validate_start(self) -> dict[str, float]:
        """Returns the figures of the weights that training starts from, and remembers the main one image by image."""
        with progress_prefix("the start"):
            figures, self.start = self._measure()
        return figures

    def save_start(self, file: Path) -> None:
        if self.start:
            with report_write_errors(file), atomic_write(file) as temporary:
                save_file(self.start, temporary)

    def load_start(self, file: Path) -> None:
        """Restores what `save_start` wrote, or raises BadInput."""
        start = read_safetensors(file)
        if can_evaluate(self.data) and self.data.test is not None:
            expected = {KNN: (torch.bool, (len(self.data.test.with_truth),))}
        else:
            images = 0 if self.agreement is None else len(self.agreement.images)
            expected = {AGREEMENT: (torch.float64, (images,))}
        if {name: (value.dtype, tuple(value.shape)) for name, value in start.items()} != expected:
            raise BadInput(f"{file} is not of this run's images")
        self.start = start

    def validate(self) -> dict[str, float]:
        """Returns figures in per cent, by name, and by how much the main one has changed; none where nothing measures
        them."""
        with progress_prefix("validation"):
            figures, now = self._measure()
            classifier = self._classifier() if can_evaluate(self.data) else {}
        for name in self.start.keys() & now.keys():
            change = change_estimate(self.start[name], now[name])
            figures |= dict(zip((f"{name}{end}" for end in _INTERVAL), astuple(change), strict=True))
        groups = {"classifier_groups": len(self.data.label_names)} if self.data.groups and classifier else {}
        return figures | classifier | groups

    def _measure(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Returns the figures of the network as it is, and the main one image by image."""
        if can_evaluate(self.data):
            result = evaluate_knn(self.features, self.data)
            return dict(result.accuracy), {KNN: _correct(result)}
        if self.agreement is None:
            return {}, {}
        agreed = self.agreement(self.features).double().cpu()
        return {AGREEMENT: 100 * float(agreed.mean())}, {AGREEMENT: agreed}

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


def changed_figure(line: Mapping[str, float]) -> str | None:
    """Returns which figure of a line has a change beside it; None if none has."""
    return next((name for name in _WORDS if f"{name}_change" in line), None)


def describe_change(line: Mapping[str, float]) -> str:
    """Returns a figure at the start and now, with the interval of the change, and what that says, in words."""
    name = changed_figure(line) or KNN
    now, (change, low, high) = line[name], (line[f"{name}{end}"] for end in _INTERVAL)
    verdict = "better than" if low > 0 else "worse than" if high < 0 else "not distinguishable from"
    interval = f"{change:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
    return f"{_WORDS[name]} {now - change:.2f} → {now:.2f} % ({interval}): {verdict} the start"
