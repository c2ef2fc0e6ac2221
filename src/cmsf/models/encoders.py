"""The online encoder with its heads, and the target encoder that follows it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from cmsf.models.precision import Precision
from cmsf.utils.distributed import World


@dataclass(frozen=True)
class EncoderOutput:
    """The output of an encoder for a batch.

    embedding: the projection, or the features where there is no projector, as unit rows.
    prediction: the predictor's output, as unit rows; the embedding where there is no predictor.
    logits: of the classes; zero columns where there is no classifier.
    """

    embedding: Float[Tensor, "b d"]
    prediction: Float[Tensor, "b d"]
    logits: Float[Tensor, "b c"]

    def __getitem__(self, chosen: Tensor | slice) -> EncoderOutput:
        return EncoderOutput(self.embedding[chosen], self.prediction[chosen], self.logits[chosen])

    def split(self, sizes: list[int]) -> list[EncoderOutput]:
        parts = zip(self.embedding.split(sizes), self.prediction.split(sizes), self.logits.split(sizes), strict=True)
        return [EncoderOutput(*part) for part in parts]

    @classmethod
    def cat(cls, parts: Sequence[EncoderOutput]) -> EncoderOutput:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def detach(self) -> EncoderOutput:
        return EncoderOutput(self.embedding.detach(), self.prediction.detach(), self.logits.detach())

    def gather(self, world: World) -> EncoderOutput:
        """Gathers the outputs of all processes, in one message."""
        columns = (self.embedding, self.prediction, self.logits)
        gathered = world.gather(torch.cat(columns, dim=1))
        return EncoderOutput(*gathered.split([column.shape[1] for column in columns], dim=1))


class Encoder(nn.Module):
    """A backbone and a projector: g, and f, in the paper."""

    def __init__(self, backbone: nn.Module, projector: nn.Module, frozen_statistics: bool = False) -> None:
        """frozen_statistics: whether the backbone's BatchNorm keeps its running statistics, and normalises by them."""
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.frozen_statistics, self._frozen = frozen_statistics, False
        self._trainable = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        self.train()

    def freeze_backbone(self, frozen: bool) -> None:
        """Leaves the backbone out of training, its statistics too, or takes it in again."""
        if frozen != self._frozen:
            self._frozen = frozen
            for parameter in self._trainable:
                parameter.requires_grad_(not frozen)
            self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        if self.frozen_statistics or self._frozen:
            for module in self.backbone.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.projector(self.backbone(images))
        return embedding


class Encoders(nn.Module):
    """The online encoder g with predictor h and classifier, which are trained; the target f, a moving average of g."""

    target: Encoder | None

    def __init__(
        self,
        backbone: nn.Module,
        dim: int,
        projector: nn.Module | None = None,
        predictor: nn.Module | None = None,
        classifier: nn.Linear | None = None,
        target: bool = True,
        precision: Precision = Precision(),
        frozen_statistics: bool = False,
    ) -> None:
        """dim: the length of an embedding. A head that is None is left out; target: whether there is an f.

        frozen_statistics: as in Encoder.
        """
        super().__init__()
        self.dim, self.precision = dim, precision
        self.online = Encoder(backbone, projector or nn.Identity(), frozen_statistics)
        self.predictor = predictor or nn.Identity()
        self.classifier = classifier
        self.target = copy.deepcopy(self.online).requires_grad_(False) if target else None
        self.to(precision.dtype)

    def encode(self, images: Float[Tensor, "b 3 h w"]) -> EncoderOutput:
        """v = h(g(x)) / |h(g(x))|, and what comes before it and beside it."""
        with self.precision.autocast(images.device):
            features = self.online.backbone(images.to(self.precision.dtype))
            projection = self.online.projector(features)
            prediction = self.predictor(projection)
            logits = features[:, :0] if self.classifier is None else self.classifier(features)
        return EncoderOutput(self._unit(projection), self._unit(prediction), logits.to(self.precision.dtype))

    @torch.no_grad()
    def embed(self, images: Float[Tensor, "b 3 h w"]) -> EncoderOutput:
        """u = f(x) / |f(x)|, without gradient."""
        assert self.target is not None
        with self.precision.autocast(images.device):
            output = self.target(images.to(self.precision.dtype))
        embedding = self._unit(output)
        return EncoderOutput(embedding, embedding, embedding[:, :0])

    @torch.no_grad()
    def update_ema(self, momentum: float) -> None:
        """f ← m f + (1 − m) g. BatchNorm's statistics are not averaged: f has its own, of what it sees."""
        if self.target is not None:
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 1 - momentum)

    def freeze_backbone(self, frozen: bool) -> None:
        """Leaves the online backbone out of training, or takes it in again."""
        self.online.freeze_backbone(frozen)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Returns whether no weight or BatchNorm statistic is NaN or inf."""
        values = [value for value in self.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack(torch._foreach_norm(values)).isfinite().all())

    def _unit(self, output: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return normalize(output.to(self.precision.dtype), dim=1)
