"""The online encoder with its predictor, and the target encoder that follows it."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.heads import perceptron
from cmsf.precision import Precision


class Encoder(nn.Module):
    """A backbone and a projector: g, and f, in the paper."""

    def __init__(self, backbone: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.projector(self.backbone(images))
        return embedding


class Encoders(nn.Module):
    """g and h, which learn, and f, a moving average of g; `width` is how many features the backbone has."""

    def __init__(
        self, backbone: nn.Module, width: int, hidden: int, dim: int, precision: Precision = Precision()
    ) -> None:
        super().__init__()
        self.dim, self.precision = dim, precision
        self.online = Encoder(backbone, perceptron(width, hidden, dim, bias=True))
        self.predictor = perceptron(dim, hidden, dim, bias=True)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.to(precision.dtype)

    def predict(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """v = h(g(x)) / |h(g(x))|."""
        with self.precision.autocast(images.device):
            output = self.predictor(self.online(images.to(self.precision.dtype)))
        return normalize(output.to(self.precision.dtype), dim=1)

    @torch.no_grad()
    def embed(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """u = f(x) / |f(x)|, without gradient."""
        with self.precision.autocast(images.device):
            output = self.target(images.to(self.precision.dtype))
        return normalize(output.to(self.precision.dtype), dim=1)

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """f ← m f + (1 − m) g. BatchNorm's statistics are not averaged: f gathers its own from what it sees."""
        torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 1 - momentum)

    def learning(self) -> list[nn.Parameter]:
        return [*self.online.parameters(), *self.predictor.parameters()]

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all weights and all of BatchNorm's statistics are numbers."""
        values = [value for value in self.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack(torch._foreach_norm(values)).isfinite().all())
