"""Tensors on the disk with a hash of their content: what is damaged or cut off counts as not there."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cmsf.utils.files import atomic_write
from cmsf.utils.progress import track

_HASH = "sha256"
_AT_ONCE = 16 << 20
"""Bytes."""


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    with atomic_write(file) as temporary:
        save_file(tensors, temporary, metadata={_HASH: _digest(tensors)})


def load_tensors(file: Path) -> dict[str, Tensor] | None:
    """Returns the tensors of a file; None where there is none, or it is damaged."""
    if not file.is_file():  # a pipe would be waited for
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            written = (opened.metadata() or {}).get(_HASH)
    except (OSError, SafetensorError):
        return None
    return tensors if _digest(tensors) == written else None


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = sha256()
    for name in sorted(tensors):
        content = tensors[name].contiguous().view(-1).view(torch.uint8)
        for block in track(content.split(_AT_ONCE), f"hashing {name}", len(content), _AT_ONCE):
            digest.update(block.numpy().data)
    return digest.hexdigest()
