"""Classifiers of embeddings that give unlabelled images pseudo-labels during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cmsf.method.rows import Rows
from cmsf.method.topk import OwnRow, nearest_vectors
from cmsf.models.heads import SGDSettings, mlp
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track
from cmsf.utils.rng import permutation

VOTES = 20
"""How many labelled neighbours vote at most."""
_TRAINING, _LEFT_OUT = 0xC1A5 << 40, 0x1EF7 << 40  # keep these random draws apart from others; no epoch is so high
_MOST_LEFT_OUT = 1000
"""Labelled images that are judged by the others: enough for a per cent or two, at no cost beside an epoch."""


class PseudoClassifier(nn.Module, ABC):
    """Is fitted to labelled rows repeatedly, and predicts class probabilities."""

    @abstractmethod
    def fit(self, rows: Rows, times: int) -> None:
        """Fits the rows that exist, two at least, from its current weights; times: how often it was fitted before."""

    @abstractmethod
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b c"]:
        """Returns the probability of each class."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabelSGD(SGDSettings):
    """The paper's SGD for each fit, of which 1 % of ImageNet's labels make 500 steps."""

    epochs: int = 10
    lr: float = 0.01
    min_steps: int = 20


class MLPClassifier(PseudoClassifier):
    """A linear layer, or an MLP with BatchNorm and ReLU after each of its hidden layers, which are twice as wide
    as the embedding. (The width is that of the authors' code; the paper's text gives the projector's.)"""

    def __init__(self, dim: int, classes: int, hidden_layers: int, sgd: PseudoLabelSGD, seed: int) -> None:
        super().__init__()
        self.sgd, self.seed = sgd, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = mlp(dim, 2 * dim, classes, hidden_layers)

    def fit(self, rows: Rows, times: int) -> None:
        known = rows[rows.exists]
        assert known.label is not None
        batch_size, epochs = self.sgd.batch_and_epochs(len(known))
        optimizer = self.sgd.make_optimizer(self.parameters())
        self.train()
        for epoch in track(range(epochs), "pseudo-labels", epochs):
            order = permutation(len(known), self.seed, _TRAINING + times, epoch).to(known.index.device)
            for batch in order[: len(known) // batch_size * batch_size].split(batch_size):
                optimizer.zero_grad()
                cross_entropy(self.layers(known.embedding[batch]), known.label[batch]).backward()
                optimizer.step()

    @torch.no_grad()
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b c"]:
        self.eval()
        probability: Tensor = self.layers(embedding).softmax(1)
        return probability


class KNNClassifier(PseudoClassifier):
    """The share of each class among the k nearest labelled rows, as they were at the last fit.

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
        no_own = OwnRow(torch.full((len(embedding),), UNKNOWN, device=embedding.device))
        near = nearest_vectors(embedding, rows.embedding, rows.exists, rows.index, self.k, no_own)
        valid = near != UNKNOWN
        votes = embedding.new_zeros(len(embedding), self.classes)
        votes.scatter_add_(1, self.label[near].clamp_min(0), valid.to(votes))
        return votes / valid.sum(1, keepdim=True).clamp_min(1)


@torch.no_grad()
def leave_one_out_accuracy(rows: Rows) -> float | None:
    """Returns how often the majority of its nearest others has a row's label; equal votes: that of the nearer ones.

    As many vote as the smallest class has besides, 20 at most. Rows that have no other of their class are not judged;
    None where there is no row to judge.
    """
    known = rows[rows.exists]
    assert known.label is not None
    members = known.label.bincount()
    judged = (members[known.label] > 1).nonzero()[:, 0]
    if not len(judged):
        return None
    judged = judged[permutation(len(judged), 0, _LEFT_OUT)[:_MOST_LEFT_OUT].to(judged.device)]
    k = min(VOTES, int(members[members > 1].min()) - 1)
    others = OwnRow(judged, included=False)
    near = nearest_vectors(known.embedding[judged], known.embedding, known.exists, known.index, k, others)
    nearness = torch.arange(k, 0, -1, dtype=torch.float64, device=near.device) / (k * (k + 1))  # half a vote in all
    votes = nearness.new_zeros(len(judged), len(members))
    votes.scatter_add_(1, known.label[near], (1 + nearness).expand(len(judged), k))
    return float((votes.argmax(1) == known.label[judged]).double().mean())
