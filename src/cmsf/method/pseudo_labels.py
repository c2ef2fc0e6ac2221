"""Pseudo-label classifiers: who says what an unlabelled image is, from its embedding, while everything still moves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cmsf.method.rows import Rows
from cmsf.method.search import OwnRow, nearest_vectors
from cmsf.models.heads import SGDSettings, mlp
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.rng import permutation

_TRAINING = 0xC1A5 << 40  # what this use of the hash is for; no epoch is ever so high


class PseudoClassifier(nn.Module, ABC):
    """Learns from labelled rows, again and again, and says how probable each class is for others."""

    @abstractmethod
    def fit(self, rows: Rows, times: int) -> None:
        """Learn from the rows that exist, two at least, going on from what it knows; `times` it has learned before."""

    @abstractmethod
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b c"]:
        """How probable each class is."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabelSGD(SGDSettings):
    """How layers are trained each time: the paper's SGD, of which 1 % of ImageNet's labels make 500 steps."""

    epochs: int = 10
    lr: float = 0.01
    min_steps: int = 20


class MLPClassifier(PseudoClassifier):
    """A linear layer, or a perceptron with BatchNorm and ReLU after each of its hidden layers, which are twice as wide
    as the embedding. (The width is that of the authors' code; the paper's text gives the projector's.)"""

    def __init__(self, dim: int, classes: int, hidden_layers: int, course: PseudoLabelSGD, seed: int) -> None:
        super().__init__()
        self.course, self.seed = course, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = mlp(dim, 2 * dim, classes, hidden_layers)

    def fit(self, rows: Rows, times: int) -> None:
        known = rows[rows.exists]
        assert known.label is not None
        batch, epochs = self.course.batch_and_epochs(len(known))
        optimiser = self.course.make_optimizer(self.parameters())
        self.train()
        for epoch in range(epochs):
            order = permutation(len(known), self.seed, _TRAINING + times, epoch).to(known.index.device)
            for some in order[: len(known) // batch * batch].split(batch):
                optimiser.zero_grad()
                cross_entropy(self.layers(known.embedding[some]), known.label[some]).backward()
                optimiser.step()

    @torch.no_grad()
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b c"]:
        self.eval()
        probability: Tensor = self.layers(embedding).softmax(1)
        return probability


class KNNClassifier(PseudoClassifier):
    """The share of each class among the k nearest labelled rows, as they were when it learned last.

    k is at most what the smallest class has, or else no class could ever have all votes.
    """

    embedding: Tensor
    index: Tensor
    label: Tensor

    def __init__(self, rows: int, dim: int, classes: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.k, self.classes = k, classes
        self.register_buffer("embedding", torch.full((rows, dim), torch.nan, dtype=dtype))
        self.register_buffer("index", torch.full((rows,), UNKNOWN))
        self.register_buffer("label", torch.full((rows,), UNKNOWN))

    def fit(self, rows: Rows, times: int) -> None:
        assert rows.label is not None
        self.embedding, self.index, self.label = rows.embedding.clone(), rows.index.clone(), rows.label.clone()

    @torch.no_grad()
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b c"]:
        rows = Rows(self.embedding, self.index, self.label)
        nobody = OwnRow(torch.full((len(embedding),), UNKNOWN, device=embedding.device))
        near = nearest_vectors(embedding, rows.embedding, rows.exists, rows.index, self.k, nobody)
        there = near != UNKNOWN
        votes = embedding.new_zeros(len(embedding), self.classes)
        votes.scatter_add_(1, self.label[near].clamp_min(0), there.to(votes))
        return votes / there.sum(1, keepdim=True).clamp_min(1)
