"""k-nearest-neighbour classification: exact, chunked, with both votes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.data import Dataset, Split
from cmsf.errors import BadInput
from cmsf.evaluation.features import LAYER, extract, raw_pixels, transform_name
from cmsf.neighbours import Own, nearest_vectors
from cmsf.rows import UNKNOWN

_CHUNK = 1024


@dataclass(frozen=True)
class KnnProtocol:
    """1-NN, and k-NN by majority (the paper's) and by a vote weighted with exp(similarity / temperature)."""

    k: int = 20
    temperature: float = 0.07


@dataclass(frozen=True)
class KnnResult:
    accuracy: dict[str, float]
    """Per cent, by the name of the vote."""
    protocol: dict[str, Any]
    """All that is needed to repeat it."""


def evaluate_knn(
    backbone: nn.Module, data: Dataset, size: int, device: torch.device | str, protocol: KnnProtocol = KnnProtocol()
) -> KnnResult:
    """Classify the test images by their neighbours among the training images."""
    train, test = _labelled(data)
    features = (extract(backbone, train, size, device), extract(backbone, test, size, device))
    return _judge(features, train, test, protocol, LAYER, size, data.test_origin)


def evaluate_pixels(data: Dataset, size: int, protocol: KnnProtocol = KnnProtocol()) -> KnnResult:
    train, test = _labelled(data)
    features = (raw_pixels(train, size), raw_pixels(test, size))
    return _judge(features, train, test, protocol, "pixels, L2-normalised", size, data.test_origin)


def can_judge(data: Dataset) -> bool:
    return data.test is not None and bool(data.train.labelled) and bool(data.test.labelled)


def vote(
    query: Float[Tensor, "q f"],
    train: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    k: int,
    temperature: float | None = None,
) -> Int[Tensor, " q"]:
    """The class most of the k nearest belong to, on the CPU like the labels.

    Equally near: the lower row. Equal votes: the lower class.
    """
    k = min(k, len(train))
    classes = int(label.max()) + 1
    everywhere = torch.ones(len(train), dtype=torch.bool, device=train.device)
    number = torch.arange(len(train), device=train.device)
    chosen = []
    for part in query.split(_CHUNK):
        nobody = Own(torch.full((len(part),), UNKNOWN, device=train.device))
        near = nearest_vectors(part, train, everywhere, number, k, nobody)
        # The few votes are counted on the CPU in double precision, which not every device has.
        similarity = (train[near] @ part[:, :, None])[:, :, 0].cpu().double()
        weight = torch.ones_like(similarity) if temperature is None else torch.exp(similarity / temperature)
        votes = torch.zeros(len(part), classes, dtype=torch.float64)
        chosen.append(votes.scatter_add_(1, label[near.cpu()], weight).argmax(1))
    return torch.cat(chosen)


def _judge(
    features: tuple[Tensor, Tensor],
    train: Split,
    test: Split,
    protocol: KnnProtocol,
    layer: str,
    size: int,
    origin: str,
) -> KnnResult:
    known, query = features
    label, truth = train.truth, test.truth
    ballots = {
        "1-nn": (1, None),
        f"{protocol.k}-nn": (protocol.k, None),
        f"{protocol.k}-nn weighted": (protocol.k, protocol.temperature),
    }
    accuracy = {
        name: 100 * (vote(query, known, label, k, temperature) == truth).double().mean().item()
        for name, (k, temperature) in ballots.items()
    }
    described = {
        **asdict(protocol),
        "vote": "majority; weighted: exp(cosine / temperature)",
        "layer": layer,
        "transform": transform_name(size),
        "train images": len(train),
        "test images": len(test),
        "classes": int(label.max()) + 1,
        "test split": origin,
    }
    return KnnResult(accuracy, described)


def _labelled(data: Dataset) -> tuple[Split, Split]:
    if data.test is None or not can_judge(data):
        raise BadInput(f"{data.name} has no labels to judge by; k-NN needs labelled training and test images")
    train, test = (split.part((split.truth != UNKNOWN).nonzero()[:, 0]) for split in (data.train, data.test))
    return train, test
