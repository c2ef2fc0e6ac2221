"""Keeps the weights of the best epoch, judged by labels that training does not use, or without labels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from cmsf.analysis.view_agreement import FEWEST, ViewAgreement
from cmsf.data import Dataset, Split
from cmsf.data.labels import Labels, share_of_each_class
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.knn import KNNClassifier, k_nearest
from cmsf.method.build import make_loss
from cmsf.models.state_dicts import read_safetensors
from cmsf.models.weights import load_strict, save_weights
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.files import make_folder
from cmsf.utils.progress import progress_prefix

HELD_OUT = "held_out"
VOTES = 20
_FILES = 3
_HELD_OUT = 0.2
"""The share of each class's labels that a method which learns from labels does not get to see."""


@dataclass(frozen=True)
class LabelledQueries:
    """Labelled images, and which of them ask: the others vote; where all of them ask, each is left out in turn."""

    images: Split
    asks: Bool[Tensor, " n"]

    def __call__(self, features: FeatureExtractor) -> float:
        """Returns how often the nearest labelled images have the label of one that asks, in per cent."""
        vectors, label = features(self.images), self.images.label
        own = None
        query, train = vectors[self.asks], vectors[~self.asks]
        expected, votes = label[self.asks], label[~self.asks]
        if self.asks.all():
            query = train = vectors
            expected = votes = label
            own = torch.arange(len(label))
        knn, classes = KNNClassifier(VOTES), int(label.max()) + 1
        guess = [
            knn.scores(votes[near], similarity, classes).argmax(1)
            for near, similarity in k_nearest(query, train, VOTES, own)
        ]
        return 100 * float((torch.cat(guess) == expected).double().mean())


def split_labels(recipe: ResolvedRecipe, data: Dataset) -> tuple[Dataset, Judge | None]:
    """Returns the data to train on, and what its epochs are judged by; None where the last one is kept.

    A method that learns from labels is judged by a fifth of those of each class, which training then does not use; any
    other by all of them, each image left out in turn. Where that is impossible, for no class has two labels, the
    judge is the agreement of views.
    """
    if recipe.keep == "last" or not recipe.epochs:
        return data, None
    labelled = data.train.labelled
    images = data.train.subset(labelled)
    several = images.label.bincount()[images.label] > 1 if len(labelled) else torch.zeros(0, dtype=torch.bool)
    if not several.any() or len(images.label.unique()) < 2:
        if len(data.train) < FEWEST:
            raise BadInput(
                "--keep best has nothing to judge by: no two classes have labels enough, and views of "
                f"{len(data.train)} images say too little (from {FEWEST} on they do); use --keep last"
            )
        return data, Judge("view_agreement", "agreement of views", ViewAgreement.of(data.train, recipe.seed))
    if not make_loss(recipe).learns_from_labels:
        queries = LabelledQueries(images, torch.ones_like(several))
        return data, Judge(HELD_OUT, f"of {len(images)} labels by leave-one-out k-NN", queries)
    if recipe.k == "all":
        raise BadInput(
            "--keep best holds labels out of training, and --k all needs one for each image; use --keep last"
        )
    labels = Labels(images.label, tuple(map(str, range(int(images.label.max()) + 1))))
    asks = share_of_each_class(labels, _HELD_OUT, recipe.seed).known & several  # of one label, none is to spare
    label = data.train.label.clone()
    label[labelled[asks]] = UNKNOWN
    judge = Judge(HELD_OUT, f"of {int(asks.sum())} held-out labels by k-NN", LabelledQueries(images, asks))
    return replace(data, train=replace(data.train, label=label)), judge


@dataclass(frozen=True)
class Judge:
    """What epochs are compared by: a name for the log, words for the user, and the measure, in per cent."""

    name: str
    words: str
    score: Callable[[FeatureExtractor], float]


class BestWeights:
    """The epoch of the highest score so far, 0 being the start; of equals, the first. A file holds its network."""

    def __init__(self, judge: Judge, features: FeatureExtractor, head: nn.Module | None, folder: Path) -> None:
        """head: the classifier that is trained along, which belongs to the features of its epoch."""
        self.judge, self.features, self.folder = judge, features, folder
        self.network = nn.ModuleDict({"backbone": features.backbone} | ({} if head is None else {"head": head}))
        self.epoch, self.score = 0, -1.0

    @property
    def file(self) -> Path:
        return self.folder / f"best-{self.epoch:05}.safetensors"

    def update(self, epoch: int, full_disk_policy: Callable[[], AbstractContextManager[None]]) -> dict[str, float]:
        """Judges the weights of an epoch, and saves them if they are the best; returns their score by its name."""
        with progress_prefix("judging"):
            score = self.judge.score(self.features)
        if score > self.score:
            with full_disk_policy():
                make_folder(self.folder)
                save_weights(self.network, self.folder / f"best-{epoch:05}.safetensors")
                self.epoch, self.score = epoch, score
                # A checkpoint may name one before the last.
                for file in sorted(self.folder.glob("best-*.safetensors"))[:-_FILES]:
                    file.unlink(missing_ok=True)
        return {self.judge.name: score}

    def restore(self) -> None:
        """Gives the network the weights of the best epoch."""
        load_strict(self.network, read_safetensors(self.file), self.file)

    def describe(self, epochs: int) -> str:
        kept = f"epoch {self.epoch} of {epochs}" if self.epoch else "the starting weights"
        return f"kept: {kept}, the best by {self.score:.2f} % {self.judge.words}"

    def state_dict(self) -> dict[str, float]:
        return {"epoch": self.epoch, "score": self.score}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the best epoch of a checkpoint; raises ValueError if its file is gone."""
        self.epoch, self.score = int(state["epoch"]), float(state["score"])
        if not self.file.exists():
            raise ValueError(f"{self.file.name} is missing")
        for file in self.folder.glob("best-*.safetensors"):  # of epochs that come again
            if file.name > self.file.name:
                file.unlink(missing_ok=True)

    def remove_files(self) -> None:
        for file in self.folder.glob("best-*.safetensors"):
            file.unlink(missing_ok=True)
