"""Random numbers as a hash of what they are for, so that no random state has to travel.

A number depends on its key (seed, epoch, image, view …) and on nothing else: not on the batch an image is in,
on the worker that loads it, or on what was drawn before. The hash is splitmix64's finaliser (Steele, Lea and
Flood 2014), whose products wrap round in int64 as they should.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def uniform(draws: int, *key: int | Tensor) -> Float[Tensor, "n draws"]:
    """Draws `draws` numbers in [0, 1) for each key; the parts of a key are integers or equally long integer tensors."""
    state = torch.zeros(1, dtype=torch.int64)
    for part in key:
        state = _scramble(state + _GOLDEN + part)
    bits = _scramble(state[:, None] + _GOLDEN * torch.arange(1, draws + 1))
    # 24 bits are what a float32 holds exactly.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def permutation(count: int, *key: int) -> Int[Tensor, " count"]:
    """Returns the numbers below `count` in an order that the key alone decides."""
    images = torch.arange(count)
    coarse, fine = uniform(2, *key, images).double().unbind(1)
    return (coarse + fine / 2**24).argsort(stable=True)


def _scramble(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shifts in zeros; torch's >> on int64 would copy the sign."""
    mask: int = 2 ** (64 - bits) - 1
    return (z >> bits) & mask
