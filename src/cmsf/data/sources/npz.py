"""Images as arrays in an .npz: x and y, or x_train, y_train, x_test and y_test."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from cmsf.data.images import ArrayImages
from cmsf.data.source import Source, SourceSplit, disambiguate
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_regular_file
from cmsf.utils.memory import available_memory
from cmsf.utils.progress import track
from cmsf.utils.text import first_line, short_repr

_ERRORS = (OSError, ValueError, EOFError, KeyError, TypeError, NotImplementedError, MemoryError, BadZipFile, zlib.error)
"""What a file with the wrong bytes in it makes numpy and zipfile raise."""
_NAMES = frozenset({"classes", *(f"{letter}{split}" for letter in "xy" for split in ("", "_train", "_val", "_test"))})


def open_npz(path: Path, name: str | None = None) -> Source:
    """Opens uint8 images (n, h, w) or (n, h, w, c) with c of 1 or 3, whole labels (-1: none), maybe `classes`."""
    arrays = _read(path)
    train = "train" if "x_train" in arrays else ""
    suffixes = {"train": train} | {split: split for split in ("val", "test") if _key("x", split) in arrays}
    labels = {split: _labels(path, arrays, suffix) for split, suffix in suffixes.items()}
    values = np.unique(np.concatenate(list(labels.values())))
    values = values[values != UNKNOWN]
    classes = _class_names(path, arrays, values)
    name_of = dict(zip(values.tolist(), classes, strict=True)) | {UNKNOWN: None}
    splits = {}
    for split, suffix in suffixes.items():
        key = _key("x", suffix)
        splits[split] = SourceSplit(to_images(arrays[key], key), [name_of[number] for number in labels[split].tolist()])
    return Source(name or path.stem, splits, classes)


def to_images(images: NDArray[np.uint8], name: str) -> ArrayImages:
    """Returns arrays with the channels last, or without any, as images with the channels first."""
    channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    paths = [f"{name}/{i}" for i in range(len(images))]
    return ArrayImages(torch.from_numpy(np.ascontiguousarray(channels_first)), paths)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """Reads the arrays that a source is made of, once it is known that they fit into memory."""
    check_regular_file(path)
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, NpzFile):
            raise ValueError("it is one array")
        with archive:
            names = [name for name in archive.files if name in _NAMES]
            if "x" not in names and "x_train" not in names:
                held = short_repr(", ".join(archive.files)) or "nothing"
                raise BadInput(f"{path} holds {held}; it needs x, or x_train and x_test")
            needed, available = sum(_size(archive, name) for name in names), available_memory()
            if needed > available:
                raise ValueError(f"its arrays take {needed:,} bytes, and there are {available:,} of memory")
            return {name: archive[name] for name in track(names, f"reading {path.name}", len(names))}
    except BadInput:
        raise
    except _ERRORS as error:
        raise BadInput(f"cannot read {path}: {first_line(error)}; cmsf takes .npz files of plain arrays") from None


def _size(archive: NpzFile, name: str) -> int:
    """Returns the bytes that an array's header says it has, which must be what the archive has of it."""
    assert archive.zip is not None
    held = next(item for item in archive.zip.infolist() if item.filename in (name, f"{name}.npy"))
    with archive.zip.open(held) as stream:
        version = np.lib.format.read_magic(stream)
        head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = head(stream)
    size = math.prod(shape) * kind.itemsize
    if min(shape, default=0) < 0 or size > held.file_size:
        raise ValueError(f"{name} is said to be of {size:,} bytes and has {held.file_size:,}")
    return size


def _key(letter: str, split: str) -> str:
    return f"{letter}_{split}" if split else letter


def _labels(path: Path, arrays: dict[str, NDArray[Any]], split: str) -> NDArray[np.int64]:
    """Returns the label of each image of a split, once both are checked."""
    key = _key("x", split)
    images, labels = arrays[key], arrays.get(_key("y", split))
    shape = images.shape
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and shape[3] not in (1, 3)):
        raise BadInput(f"{key} of {path} is {images.dtype} {shape}; images are uint8 (n, h, w) or (n, h, w, 3)")
    if images.size == 0:
        raise BadInput(f"{key} of {path} holds no pixels: its shape is {shape}")
    if labels is None:
        return np.full(len(images), UNKNOWN)
    if labels.shape != shape[:1] or labels.dtype.kind not in "iu":
        raise BadInput(f"{path} has {shape[0]} images but labels {labels.dtype} {labels.shape}; one whole number each")
    if labels.min() < UNKNOWN or labels.max() > 2**31:
        raise BadInput(f"labels of {path} reach from {labels.min()} to {labels.max()}; use 0, 1, 2 … and -1 for none")
    return labels.astype(np.int64)


def _class_names(path: Path, arrays: dict[str, NDArray[Any]], values: NDArray[np.int64]) -> tuple[str, ...]:
    named = arrays.get("classes")
    if named is None:
        return tuple(str(value) for value in values)
    if named.ndim != 1 or (len(values) and values[-1] >= len(named)):
        count = "no list" if named.ndim != 1 else f"{len(named)} names"
        highest = values[-1] if len(values) else "none"
        raise BadInput(f"`classes` of {path} is {count}, and the highest label is {highest}; name them all")
    called = disambiguate([str(name) for name in named])
    return tuple(called[value] for value in values)
