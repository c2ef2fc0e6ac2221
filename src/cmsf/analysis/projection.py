"""Projections of features onto a plane: PCA, and UMAP where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor


def pca(features: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """Projects onto the two directions of greatest variance, each with its largest weight positive."""
    centred = features.cpu().double()
    centred = centred - centred.mean(0)
    main = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -2:].flip(1)
    largest = main.gather(0, main.abs().argmax(0, keepdim=True))
    projected = centred @ (main * largest.sign())
    return torch.nn.functional.pad(projected, (0, 2 - projected.shape[1])).float()


def umap(features: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """Projects by UMAP (McInnes et al. 2018) with cosine distance and a fixed seed."""
    from umap import UMAP

    return torch.from_numpy(UMAP(metric="cosine", random_state=0, n_jobs=1).fit_transform(features.cpu().numpy()))


def projections() -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns the projections that are installed, by name."""
    return {"PCA": pca, "UMAP": umap} if find_spec("umap") is not None else {"PCA": pca}
