"""The paper's Section 2 as slow loops over lists: what the fast code is held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cmsf.method.rows import Rows
from cmsf.utils.constants import UNKNOWN

Related = Callable[[int], list[int]]


def own_position(query: Rows, rows: Rows, i: int) -> int:
    return rows.index.tolist().index(int(query.index[i]))


def existing(rows: Rows) -> list[int]:
    return [j for j in range(len(rows)) if int(rows.index[j]) != UNKNOWN]


def everything(query: Rows, rows: Rows) -> Related:
    return lambda i: existing(rows)


def same_label(query: Rows, rows: Rows) -> Related:
    def related(i: int) -> list[int]:
        label = int(query.label[i])
        if label == UNKNOWN:
            return existing(rows)
        return [j for j in existing(rows) if int(rows.label[j]) == label]

    return related


def near_companion(query: Rows, rows: Rows, k: int) -> Related:
    def related(i: int) -> list[int]:
        if query.companion[i].isnan().any():
            return existing(rows)
        having = [j for j in existing(rows) if not rows.companion[j].isnan().any()]
        return ordered(query.companion[i], rows.companion, rows, having, own_position(query, rows, i))[:k]

    return related


def ordered(vector: Tensor, among: Tensor, rows: Rows, positions: list[int], own: int) -> list[int]:
    """The query's own row first, then by similarity; equal ones by image index."""
    return sorted(positions, key=lambda j: (j != own, -float(vector @ among[j]), int(rows.index[j])))


def chosen(query: Rows, rows: Rows, related: Related, k: int | None, include_query: bool = True) -> list[list[int]]:
    sets = []
    for i in range(len(query)):
        own = own_position(query, rows, i)
        candidates = [j for j in related(i) if include_query or j != own]
        nearest = ordered(query.embedding[i], rows.embedding, rows, candidates, own)
        sets.append(nearest if k is None else nearest[:k])
    return sets


def loss(prediction: Tensor, rows: Rows, sets: list[list[int]]) -> Tensor:
    """1/n Σ_i (2 − 2 v_i · 1/|S_i| Σ_{z ∈ S_i} z), over the queries that have neighbours."""
    terms = []
    for i, neighbours in enumerate(sets):
        if neighbours:
            mean = torch.zeros_like(rows.embedding[0])
            for j in neighbours:
                mean = mean + rows.embedding[j] / len(neighbours)
            terms.append(2 - 2 * (prediction[i] * mean).sum())
    return torch.stack(terms).mean()


def constrained_nce(
    prediction: Tensor, query: Rows, rows: Rows, sets: list[list[int]], related: list[list[int]], temperature: float
) -> Tensor:
    """−log exp(v·z̄/τ) / (exp(v·z̄/τ) + Σ_{j ∈ N_i} exp(v·u_j/τ)), z̄ the mean of S_i, over queries with neighbours.

    related: the rows whose images are no negatives of each query.
    """
    terms = []
    for i, neighbours in enumerate(sets):
        if not neighbours:
            continue
        left_out = {int(rows.index[j]) for j in related[i]} | {int(query.index[i])}
        mean = sum(rows.embedding[j] for j in neighbours) / len(neighbours)
        pull = (prediction[i] @ mean / temperature).exp()
        others = [j for j in range(len(query)) if int(query.index[j]) not in left_out]
        push = sum((prediction[i] @ query.embedding[j] / temperature).exp() for j in others)
        terms.append(-(pull / (pull + push)).log())
    return torch.stack(terms).mean()


def uniformity(v: Tensor) -> Tensor:
    """log of the mean over pairs i ≠ j of exp(−2 ‖v_i − v_j‖²)."""
    pairs = [(i, j) for i in range(len(v)) for j in range(len(v)) if i != j]
    return (sum((-2 * ((v[i] - v[j]) ** 2).sum()).exp() for i, j in pairs) / len(pairs)).log()


def koleo(v: Tensor) -> Tensor:
    """−1/n Σ_i log min_{j≠i} ‖v_i − v_j‖."""
    logs = []
    for i in range(len(v)):
        apart = [((v[i] - v[j]) ** 2).sum().sqrt() for j in range(len(v)) if j != i]
        logs.append(min(apart, key=lambda distance: float(distance.detach())).log())
    return -sum(logs) / len(logs)
