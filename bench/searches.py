"""The contestants of the k-NN search, and whether they find the same."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch
from faiss_process import Faiss, kernels_for_this_processor
from jobs import Job, Timed
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.evaluation.knn import KNNClassifier, classify, k_nearest
from cmsf.method.topk import MAX_BLOCK

TRAIN, QUERIES, FEATURES, CLASSES, K = 50_000, 10_000, 512, 10, 20
SAME = 1e-6
"""Rounding in float32: how far apart two similarities are that may be taken for equal."""
FAISS, PRODUCT = "faiss", "the bare product"


def vectors() -> tuple[Tensor, Tensor, Tensor]:
    """Training vectors, queries and labels: unit vectors about a centre for each class."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(CLASSES, FEATURES, generator=generator)

    def about_centres(count: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(CLASSES, (count,), generator=generator)
        return normalize(torch.randn(count, FEATURES, generator=generator) + 0.5 * centre[label]), label

    (train, label), (query, _) = about_centres(TRAIN), about_centres(QUERIES)
    return train, query, label


def search_jobs(train: Tensor, query: Tensor, label: Tensor, threads: int, stack: ExitStack) -> list[Job]:
    def product(out: Tensor | None) -> None:
        for part in query.split(MAX_BLOCK // TRAIN):
            torch.mm(part, train.T, out=None if out is None else out[: len(part)])

    def product_into_one_block() -> None:
        product(torch.empty(MAX_BLOCK // TRAIN, TRAIN))

    def scikit_learn(metric: str) -> Job:
        model = NearestNeighbors(n_neighbors=K, algorithm="brute", metric=metric, n_jobs=threads).fit(train.numpy())
        return Job(f"scikit-learn, {metric}", lambda: model.kneighbors(query.numpy(), return_distance=False))

    def faiss(core_type: str | None) -> Job:
        index = stack.enter_context(closing(Faiss(train.numpy(), query.numpy(), threads, core_type)))
        name = FAISS if core_type is None else f"{FAISS}, told the processor"
        return Job(f"{name} (kernels: {index.kernels})", lambda: index.search(K))

    known = kernels_for_this_processor("numpy")
    return [
        Job("cmsf", lambda: classify(query, train, label, {"20-nn": KNNClassifier(K)})),
        Job(PRODUCT, product_into_one_block),
        Job(f"{PRODUCT}, new memory for every chunk", lambda: product(None)),
        faiss(None),
        *([] if known is None else [faiss(known)]),
        scikit_learn("euclidean"),
        scikit_learn("cosine"),
    ]


def agreement(train: Tensor, query: Tensor, results: dict[str, Timed]) -> dict[str, Any]:
    """That all have found rows that are as near as ours, in double precision and up to rounding."""
    ours = torch.cat([near for near, _ in k_nearest(query, train, K)])
    found = {
        name: torch.from_numpy(one.outcome) for name, one in results.items() if isinstance(one.outcome, np.ndarray)
    }
    told = {}
    for name, theirs in found.items():
        gap = float((_similarities(train, query, ours) - _similarities(train, query, theirs)).abs().max())
        if gap > SAME:
            raise RuntimeError(f"cmsf and {name} differ by {gap:g} in how near their neighbours are")
        other = int((ours.sort(1).values != theirs.sort(1).values).any(1).sum())
        told[name] = {"queries with another row among them": other, "largest gap in similarity": gap}
    return told


def _similarities(train: Tensor, query: Tensor, near: Tensor) -> Tensor:
    """Nearest first: rows whose places rounding has swapped are the same."""
    parts = zip(query.double().split(500), near.split(500), strict=True)
    return torch.cat([torch.einsum("qkf,qf->qk", train[rows].double(), part).sort(1).values for part, rows in parts])
