"""Images as arrays in an .npz: x and y, or x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from cmsf.data.dataset import Dataset, Source, Split, hold_out
from cmsf.errors import BadInput
from cmsf.rows import UNKNOWN

_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    NotImplementedError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What a file with the wrong bytes in it makes numpy and zipfile raise."""


class Arrays(Source):
    """uint8 images (n, h, w) or (n, h, w, c) with c of 1 or 3, whole labels (-1: none), and optionally `classes`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem
        self.arrays = self._read()
        self.train = "train" if "x_train" in self.arrays else ""
        if self._key("x", self.train) not in self.arrays:
            raise BadInput(f"{path} holds {', '.join(self.arrays) or 'nothing'}; it needs x, or x_train and x_test")
        self.parts = [part for part in (self.train, "test") if self._key("x", part) in self.arrays]
        for part in self.parts:
            self._check(part)
        every = [self._labels(part) for part in self.parts]
        self.values = np.unique(np.concatenate(every))
        self.values = self.values[self.values != UNKNOWN]
        self.classes = self._class_names()

    def typical_side(self) -> int:
        return int(min(self.arrays[self._key("x", self.train)].shape[1:3]))

    def load(self, largest_side: int, seed: int) -> Dataset:
        train = self._split(self.train)
        if "test" not in self.parts:
            return hold_out(self.name, self.classes, train, seed)
        test = self._split("test")
        return Dataset(self.name, self.classes, train, test, f"{len(test)} images of x_test")

    def _read(self) -> dict[str, NDArray[Any]]:
        try:
            archive = np.load(self.path, allow_pickle=False)
            if not isinstance(archive, NpzFile):
                raise ValueError("it is one array")
            with archive:
                return dict(archive)
        except _UNREADABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise BadInput(f"cannot read {self.path}: {reason}; cmsf takes .npz files of plain arrays") from None

    @staticmethod
    def _key(letter: str, part: str) -> str:
        return f"{letter}_{part}" if part else letter

    def _check(self, part: str) -> None:
        key = self._key("x", part)
        images, labels = self.arrays[key], self.arrays.get(self._key("y", part))
        shape = images.shape
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and shape[3] not in (1, 3)):
            raise BadInput(
                f"{key} of {self.path} is {images.dtype} {shape}; images are uint8 (n, h, w) or (n, h, w, 3)"
            )
        if images.size == 0:
            raise BadInput(f"{key} of {self.path} holds no pixels: its shape is {shape}")
        if labels is None:
            return
        if labels.shape != shape[:1] or labels.dtype.kind not in "iu":
            raise BadInput(
                f"{self.path} has {shape[0]} images but labels {labels.dtype} {labels.shape}; one whole number each"
            )
        if labels.min() < UNKNOWN or labels.max() > 2**31:
            raise BadInput(
                f"labels of {self.path} reach from {labels.min()} to {labels.max()}; use 0, 1, 2 … and -1 for none"
            )

    def _labels(self, part: str) -> NDArray[np.int64]:
        images, labels = self.arrays[self._key("x", part)], self.arrays.get(self._key("y", part))
        return np.full(len(images), UNKNOWN) if labels is None else labels.astype(np.int64)

    def _split(self, part: str) -> Split:
        images, labels = self.arrays[self._key("x", part)], self._labels(part)
        truth = np.where(labels == UNKNOWN, UNKNOWN, np.searchsorted(self.values, labels))
        channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        paths = [f"{self._key('x', part)}/{i}" for i in range(len(images))]
        return Split(torch.from_numpy(np.ascontiguousarray(channels_first)), paths, torch.from_numpy(truth))

    def _class_names(self) -> tuple[str, ...]:
        named = self.arrays.get("classes")
        if named is None:
            return tuple(str(value) for value in self.values)
        if named.ndim != 1 or (len(self.values) and self.values[-1] >= len(named)):
            count = "no list" if named.ndim != 1 else f"{len(named)} names"
            highest = self.values[-1] if len(self.values) else "none"
            raise BadInput(f"`classes` of {self.path} is {count}, and the highest label is {highest}; name them all")
        return tuple(str(named[value]) for value in self.values)
