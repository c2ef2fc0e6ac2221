"""Numeric precision: of networks as the recipe says; banks, losses and search use fp32 or fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cmsf.utils.errors import BadInput

Name = Literal["fp32", "bf16", "fp16", "fp64"]
_BF16_INSTRUCTIONS = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
"""Of a CPU, by torch's names and by their usual ones."""


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


def pick_precision(device: torch.device) -> tuple[Name, str]:
    """Returns the fastest precision that learns as well as fp32, and why (docs/decisions/33-precision-auto.md)."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "this GPU has bf16") if supported else ("fp32", "this GPU has no bf16")
    if device.type == "cpu":
        if not hasattr(torch.cpu, "get_capabilities"):
            return "fp32", f"torch {torch.__version__} does not say whether the processor has bf16"
        capabilities = torch.cpu.get_capabilities()
        for name, usual in _BF16_INSTRUCTIONS.items():
            if capabilities.get(name):
                return "bf16", f"this processor has {usual}"
        return "fp32", "this processor has no bf16 instructions"
    return "fp32", f"bf16 was not measured on {device.type}"
