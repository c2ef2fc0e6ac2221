"""Images as arrays in an .npz: x and y, or x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cmsf.data.dataset import Dataset, Source, Split, hold_out
from cmsf.errors import BadInput
from cmsf.rows import UNKNOWN


class Arrays(Source):
    """uint8 images (n, h, w) or (n, h, w, c) with c of 1 or 3, whole labels, and optionally the names `classes`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.stem
        try:
            with np.load(path, allow_pickle=False) as archive:
                self.arrays = dict(archive)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise BadInput(f"cannot read {path}: {error}; cmsf takes .npz files of plain arrays") from None
        self.images = "x_train" if "x_train" in self.arrays else "x"
        if self.images not in self.arrays:
            raise BadInput(f"{path} holds {', '.join(self.arrays) or 'nothing'}; it needs x, or x_train and x_test")
        for key in self.arrays:
            if key.startswith("x"):
                self._check(key)

    def typical_side(self) -> int:
        return int(min(self.arrays[self.images].shape[1:3]))

    def load(self, largest_side: int, seed: int) -> Dataset:
        classes = self._classes()
        train = self._split(self.images)
        if "x_test" not in self.arrays:
            return hold_out(self.name, classes, train, seed)
        test = self._split("x_test")
        return Dataset(self.name, classes, train, test, f"{len(test)} images of x_test")

    def _check(self, key: str) -> None:
        images, labels = self.arrays[key], self.arrays.get(key.replace("x", "y", 1))
        shape = images.shape
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and shape[3] not in (1, 3)):
            raise BadInput(
                f"{key} of {self.path} is {images.dtype} {shape}; images are uint8 (n, h, w) or (n, h, w, 3)"
            )
        if len(images) == 0:
            raise BadInput(f"{key} of {self.path} holds no images")
        if labels is not None and (labels.shape != shape[:1] or labels.dtype.kind not in "iu"):
            raise BadInput(
                f"{self.path} has {shape[0]} images but labels {labels.dtype} {labels.shape}; one whole number each"
            )

    def _split(self, key: str) -> Split:
        images = self.arrays[key]
        labels = self.arrays.get(key.replace("x", "y", 1))
        truth = np.full(len(images), UNKNOWN) if labels is None else labels.astype(np.int64)
        channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        paths = [f"{key}/{i}" for i in range(len(images))]
        return Split(torch.from_numpy(np.ascontiguousarray(channels_first)), paths, torch.from_numpy(truth))

    def _classes(self) -> tuple[str, ...]:
        labels = self.arrays.get(self.images.replace("x", "y", 1))
        count = 0 if labels is None or not len(labels) else int(labels.max()) + 1
        named: NDArray[np.str_] = self.arrays.get("classes", np.array([], dtype=str))
        return tuple(str(name) for name in named) if len(named) >= count else tuple(str(i) for i in range(count))
