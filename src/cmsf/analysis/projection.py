"""Features on a plane, to be looked at: by their two main directions at once, by UMAP where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor


def pca(features: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """The two directions of greatest variance; each points to where its largest weight is positive."""
    centred = features.cpu().double()
    centred = centred - centred.mean(0)
    main = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -2:].flip(1)
    largest = main.gather(0, main.abs().argmax(0, keepdim=True))
    placed = centred @ (main * largest.sign())
    return torch.nn.functional.pad(placed, (0, 2 - placed.shape[1])).float()


def umap(features: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """McInnes et al. 2018, by cosine; the same for the same features."""
    from umap import UMAP

    placed = UMAP(metric="cosine", random_state=0, n_jobs=1).fit_transform(features.cpu().numpy())
    return torch.from_numpy(placed)


Project = Callable[[Tensor], Tensor]


def projections() -> dict[str, Project]:
    """What this machine can draw maps by."""
    found: dict[str, Project] = {"PCA": pca}
    return found | ({"UMAP": umap} if find_spec("umap") is not None else {})
