"""Numeric precision: of networks as the recipe says; banks, losses and search use fp32 or fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cmsf.utils.errors import BadInput

Name = Literal["fp32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True)
class Precision:
    name: Name = "fp32"

    def check(self, device: torch.device) -> None:
        """Raises BadInput for a precision that the device does not support."""
        if device.type == "mps" and self.name in ("fp64", "fp16"):
            remedy = "--device cpu" if self.name == "fp64" else "--precision bf16"
            raise BadInput(f"--precision {self.name} is not supported on mps; use {remedy}")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, embeddings and bank."""
        return torch.float64 if self.name == "fp64" else torch.float32

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the cache of one row an image, the largest thing in memory: half the bits where a run is mixed anyway."""
        return torch.float16 if self._lower is not None else self.dtype

    @property
    def uses_loss_scaling(self) -> bool:
        """Whether the loss is scaled, as gradients in fp16 underflow otherwise."""
        return self.name == "fp16"

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the context in which the network computes in lower precision; weights and outputs keep theirs."""
        return torch.autocast(device.type, dtype=self._lower, enabled=self._lower is not None)

    @property
    def _lower(self) -> torch.dtype | None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
