"""Keeps the weights of the best epoch, judged by labels that training does not use, or without labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cmsf.analysis.view_agreement import FEWEST, ViewAgreement
from cmsf.data import Dataset, Split
from cmsf.data.labels import Labels, share_of_each_class
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.knn import KNN_CLASSIFIERS, k_nearest
from cmsf.evaluation.metrics import change_estimate
from cmsf.method.build import make_loss
from cmsf.models.weights import load_strict
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.training.validation import AGREEMENT
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_prefix
from cmsf.utils.rng import permutation

HELD_OUT = "held_out"
VOTE = KNN_CLASSIFIERS["20-nn weighted"]
"""Weighted: of a class with few labels the nearest count, where a majority of 20 would be of other classes."""
_HELD_OUT = 0.2
"""The share of each class's labels that a method which learns from labels does not get to see."""
_ENOUGH, _TO_SPARE, _MOST = 50, 20, 5000
"""Images that judge, at least and at most; and labels of a class, in the median, from which on some can be spared."""
_ASKING = 0xA5C0 << 40  # what this use of the hash is for; no epoch is ever so high


@dataclass(frozen=True)
class LabelledQueries:
    """Labelled images: which of them ask, and which vote; where all vote, one that asks is left out."""

    images: Split
    asks: Bool[Tensor, " n"]
    votes: Bool[Tensor, " n"]

    def __call__(self, features: FeatureExtractor) -> Float[Tensor, " q"]:
        """Returns 1 for each image that asks and whose nearest voters have its label, else 0."""
        vectors, label = features(self.images), self.images.label
        query, voters = (vectors[chosen.to(vectors.device)] for chosen in (self.asks, self.votes))
        own = self.asks.nonzero()[:, 0] if self.votes.all() else None
        classes = int(label.max()) + 1
        guess = [
            VOTE.scores(label[self.votes][near], similarity, classes).argmax(1)
            for near, similarity in k_nearest(query, voters, VOTE.k, own)
        ]
        return (torch.cat(guess) == label[self.asks]).double()


@dataclass(frozen=True)
class Judge:
    """What epochs are compared by: a name for the log, words for the user, and a measure from 0 to 1 of each image."""

    name: str
    words: str
    measure: Callable[[FeatureExtractor], Float[Tensor, " q"]]
    note: str = ""
    """What training has less of."""


def split_labels(recipe: ResolvedRecipe, data: Dataset) -> tuple[Dataset, Judge | None]:
    """Returns the data to train on, and what its epochs are judged by; None where the last one is kept.

    A method that learns from labels is judged by a fifth of those of each class, which training then does not use; any
    other by all of them, each image left out in turn. Where labels are too few for that, the judge is the agreement of
    views.
    """
    if recipe.keep == "last" or not recipe.epochs:
        return data, None
    labelled = data.train.labelled
    images, count = data.train.subset(labelled), len(labelled)
    members = images.label.bincount() if count else torch.zeros(0, dtype=torch.int64)
    several = members[images.label] > 1 if count else torch.zeros(0, dtype=torch.bool)
    if int((members > 1).sum()) < 2:
        return data, _judge_by_views(recipe, data)
    if not make_loss(recipe).learns_from_labels:
        asks = _at_most(several, recipe.seed)
        if int(asks.sum()) < _ENOUGH and len(data.train) >= FEWEST:
            return data, _judge_by_views(recipe, data)
        words = f"of {int(asks.sum()):,} labels by leave-one-out k-NN"
        return data, Judge(HELD_OUT, words, LabelledQueries(images, asks, torch.ones_like(asks)))
    if recipe.k == "all":
        raise BadInput(
            "--keep best holds labels out of training, and --k all needs one for each image; use --keep last"
        )
    labels = Labels(images.label, tuple(map(str, range(len(members)))))
    held_out = share_of_each_class(labels, _HELD_OUT, recipe.seed).known & several  # of one label, none is to spare
    to_spare = float(members[members > 0].double().median()) >= _TO_SPARE and int(held_out.sum()) >= _ENOUGH
    if not to_spare and len(data.train) >= FEWEST:
        return data, _judge_by_views(recipe, data)
    asks = _at_most(held_out, recipe.seed)
    label = data.train.label.clone()
    label[labelled[held_out]] = UNKNOWN
    note = (
        f"{int(held_out.sum()):,} of {count:,} labels judge the epochs and are not trained with; --keep last trains "
        "with all"
    )
    words = f"of {int(asks.sum()):,} held-out labels by k-NN"
    judge = Judge(HELD_OUT, words, LabelledQueries(images, asks, ~held_out), note)
    return replace(data, train=replace(data.train, label=label)), judge


def _judge_by_views(recipe: ResolvedRecipe, data: Dataset) -> Judge:
    if len(data.train) < FEWEST:
        raise NothingToJudgeBy(
            f"no two classes have labels enough, and views of {len(data.train)} images say too little (from {FEWEST} "
            "on they do)"
        )
    return Judge(AGREEMENT, "agreement of views", ViewAgreement.of(data.train, recipe.seed))


def _at_most(chosen: Bool[Tensor, " n"], seed: int) -> Bool[Tensor, " n"]:
    """Returns some of the chosen images where they are more than it takes."""
    place = chosen.nonzero()[:, 0]
    some = torch.zeros_like(chosen)
    some[place[permutation(len(place), seed, _ASKING)[:_MOST]]] = True
    return some


class NothingToJudgeBy(BadInput):
    """The best epoch is to be kept, and there are neither labels nor images enough to tell which it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--keep best has nothing to judge by: {reason}; use --keep last")
        self.reason = reason


class BestWeights:
    """The best epoch so far, 0 being the start, and its network.

    An epoch takes the place of the start only if the judge's 95 % interval says that it is better, and that of another
    epoch if its score is higher.
    """

    def __init__(self, judge: Judge, features: FeatureExtractor, head: nn.Module | None) -> None:
        """head: the classifier that is trained along, which belongs to the features of its epoch."""
        self.judge, self.features = judge, features
        self.network = nn.ModuleDict({"backbone": features.backbone} | ({} if head is None else {"head": head}))
        self.epoch, self.score = 0, 0.0
        self.start, self.weights = torch.zeros(0, dtype=torch.float64), self._copy()

    def update(self, epoch: int) -> dict[str, float]:
        """Judges the weights of an epoch, and keeps a copy if they are the best; returns their score by its name."""
        with progress_prefix("judging"):
            measured = self.judge.measure(self.features).double().cpu()
        score = 100 * float(measured.mean())
        if epoch == 0:
            self.start, self.score = measured, score
        elif score > self.score and change_estimate(self.start, measured).low > 0:
            self.epoch, self.score, self.weights = epoch, score, self._copy()
        return {self.judge.name: score}

    def restore(self) -> None:
        """Gives the network the weights of the best epoch."""
        load_strict(self.network, self.weights, "the best epoch")

    def describe(self, epochs: int) -> str:
        if self.epoch:
            return f"kept: epoch {self.epoch} of {epochs}, the best by {self.score:.2f} % {self.judge.words}"
        return (
            f"kept: the starting weights, {self.score:.2f} % {self.judge.words}; no epoch is better beyond the 95 % "
            "interval"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the best epoch with its weights, which are never changed in place."""
        return {"epoch": self.epoch, "score": self.score, "start": self.start, "weights": self.weights}

    def load_state_dict(self, state: Any, epochs: int) -> None:
        """Restores the best epoch of a checkpoint; raises ValueError where it does not fit."""
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise ValueError("its best epoch has other entries")
        epoch, score, start, weights = (state[name] for name in ("epoch", "score", "start", "weights"))
        own = self.weights
        if type(epoch) is not int or not 0 <= epoch <= epochs or type(score) is not float or not math.isfinite(score):
            raise ValueError("its best epoch is none")
        if not isinstance(start, Tensor) or start.dtype != torch.float64 or start.ndim != 1 or not len(start):
            raise ValueError("its start was not judged")
        if not isinstance(weights, dict) or weights.keys() != own.keys():
            raise ValueError("its best weights are of another network")
        for name, value in weights.items():
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (own[name].shape, own[name].dtype):
                raise ValueError("its best weights are of another network")
        self.epoch, self.score, self.start, self.weights = epoch, score, start, weights

    def _copy(self) -> dict[str, Tensor]:
        return {name: value.detach().to("cpu", copy=True) for name, value in self.network.state_dict().items()}
