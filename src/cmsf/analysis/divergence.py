"""Divergence: which numbers of a network are none any more, and which are on their way there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SHOWN = 20


@torch.no_grad()
def describe_numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors with numbers that are not finite, and the largest norms of the others."""
    floating = {name: value.detach().double() for name, value in tensors.items() if value.is_floating_point()}
    broken = {name: int((~value.isfinite()).sum()) for name, value in floating.items() if not value.isfinite().all()}
    norms = {name: float(value.norm()) for name, value in floating.items() if name not in broken}
    largest = sorted(norms.items(), key=lambda named: -named[1])[:_SHOWN]
    return {
        "not finite": {name: f"{count} of {floating[name].numel()}" for name, count in list(broken.items())[:_SHOWN]},
        "tensors not finite": len(broken),
        "largest norms": dict(largest),
    }


def say_number(value: float) -> float | str:
    """JSON has no NaN and no infinity, and here they are what it is about."""
    return value if math.isfinite(value) else str(value)
