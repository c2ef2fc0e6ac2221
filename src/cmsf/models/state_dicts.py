"""Tensors by name, out of files that somebody else may have written."""

from __future__ import annotations

import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_regular_file
from cmsf.utils.text import first_line, shorten

_WRAPPERS = ("state_dict", "model", "backbone", "teacher", "params", "student", "encoder")
"""The keys below which training scripts keep the weights; of a teacher and its student, the teacher's are taken."""
_MAX_NESTING = 8
_SMALL = 1 << 20
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_REMEDY = "give a .safetensors or a plain state dict"


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Reads tensors by name from a .safetensors file that somebody else may have written, or raises BadInput."""
    check_regular_file(file)
    try:
        return safetensors.torch.load_file(file)
    except Exception as error:  # what a damaged or hostile file raises is anybody's guess
        raise BadInput(f"cannot read {file}: {_load_error(error)}") from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Reads tensors by name from a .safetensors file or one of torch's, without running what may be in it."""
    if check_regular_file(path) == 0:
        raise BadInput(f"cannot read --init {path}: it is empty; {_REMEDY}")
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        else:
            _check_archive(path)
            with warnings.catch_warnings():  # of pickles that are none, on their way to being refused
                warnings.simplefilter("ignore")
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile file raises is anybody's guess
        raise BadInput(f"cannot read --init {path}: {_load_error(error)}; {_REMEDY}") from None
    return _unwrap(state, path)


def is_plain(value: Any) -> bool:
    """Returns whether it is a dense tensor whose storage holds all of its numbers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def short_name(name: object) -> str:
    """Returns a tensor's name, which may be of any length, for a message."""
    return shorten(str(name)[:200], 60)


def _check_archive(path: Path) -> None:
    """Refuses what torch would unpack to the disk, or blow up in memory, before it finds out what it is."""
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    if head.startswith(_ZIP):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(item.file_size for item in archive.infolist())
        if unpacked > 2 * path.stat().st_size + _SMALL:  # torch itself does not compress
            raise ValueError(f"its {path.stat().st_size:,} bytes would become {unpacked:,}")
        return
    if not head.startswith(_PICKLE):
        raise ValueError("it is not what torch writes")
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        raise ValueError("it is a tar archive")


def _load_error(error: Exception) -> str:
    """Returns the reason without torch's advice to load what is refused in an unsafe way."""
    if "weights_only" in str(error) or "Weights only" in str(error):
        return "it is damaged, or holds more than tensors"
    return first_line(error)


def _unwrap(state: Any, path: Path) -> dict[str, Tensor]:
    """Returns tensors by name, out of what training scripts wrap them in."""
    for _ in range(_MAX_NESTING):  # a pickle may hold itself
        if isinstance(state, Mapping):
            state = next((state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not state:
        raise BadInput(f"--init {path} holds no weights; {_REMEDY}")
    for name, value in state.items():
        if not isinstance(name, str) or not is_plain(value):
            kind = type(value).__name__
            raise BadInput(
                f"--init {path} is not a state dict: {short_name(name)!r} is of type {kind}; save tensors by name"
            )
    return {name: value.detach() for name, value in state.items()}
