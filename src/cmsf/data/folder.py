"""A folder of photos: class folders, or one flat unlabelled pile; train, val and test folders are splits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import track
from torch import Tensor

from cmsf.data.dataset import Dataset, Source, Split, hold_out
from cmsf.errors import BadInput
from cmsf.rows import UNKNOWN

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_TRAINING, _TESTING = ("train", "trainval"), ("test", "val")
_PEEK = 200


class Folder(Source):
    """Images by path; a folder whose subfolders are all called train, trainval, val or test has splits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.resolve().name
        paths = _images_below(root)
        if not paths:
            raise BadInput(f"no images below {root}; cmsf reads {' '.join(SUFFIXES)}")
        self.train_root, self.test_root = self._split_roots(paths)
        self.train_paths = [path for path in paths if path.is_relative_to(self.train_root)]
        self.test_paths = [path for path in paths if self.test_root and path.is_relative_to(self.test_root)]

    def typical_side(self) -> int:
        every = max(1, len(self.train_paths) // _PEEK)
        return int(statistics.median(min(_open(path).size) for path in self.train_paths[::every]))

    def load(self, largest_side: int, seed: int) -> Dataset:
        notes: tuple[str, ...] = ()
        folders = _class_folders(self.train_root, self.train_paths)
        if not folders and any(path.parent != self.train_root for path in self.train_paths):
            loose = sum(path.parent == self.train_root for path in self.train_paths)
            notes = (f"{loose} images lie in {self.train_root} itself, so its folders are not taken as classes",)
        test_folders = _class_folders(self.test_root, self.test_paths) if self.test_root else []
        classes = tuple(sorted({*folders, *test_folders} if folders else ()))
        train = self._split(self.train_paths, folders, classes, largest_side)
        if self.test_root is None:
            return replace(hold_out(self.name, classes, train, seed), notes=notes)
        test = self._split(self.test_paths, test_folders, classes, largest_side)
        return Dataset(self.name, classes, train, test, f"{len(test)} images of {self.test_root.name}/", notes)

    def _split_roots(self, paths: list[Path]) -> tuple[Path, Path | None]:
        first = {path.relative_to(self.root).parts[0] for path in paths}
        training = [name for name in _TRAINING if name in first]
        if not training or not first <= {*_TRAINING, *_TESTING}:
            return self.root, None
        testing = [name for name in _TESTING if name in first]
        return self.root / training[0], self.root / testing[0] if testing else None

    def _split(self, paths: list[Path], folders: list[str], classes: tuple[str, ...], largest_side: int) -> Split:
        pictures = _decode_all(paths, largest_side)
        number = {name: i for i, name in enumerate(classes)}
        truth = [number.get(folder, UNKNOWN) for folder in folders] or [UNKNOWN] * len(paths)
        relative = [path.relative_to(self.root).as_posix() for path in paths]
        one_size = len({picture.shape for picture in pictures}) == 1
        return Split(torch.stack(pictures) if one_size else pictures, relative, torch.tensor(truth))


def _images_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _class_folders(root: Path, paths: list[Path]) -> list[str]:
    """The first folder below the root for each image; none where any image lies in the root itself."""
    parts = [path.relative_to(root).parts for path in paths]
    return [] if any(len(part) == 1 for part in parts) else [part[0] for part in parts]


def _decode_all(paths: Sequence[Path], largest_side: int) -> list[Tensor]:
    with ThreadPoolExecutor() as pool:
        decoded = pool.map(lambda path: _decode(path, largest_side), paths)
        console = Console(stderr=True)
        shown = track(decoded, "decoding", len(paths), console=console, transient=True, disable=not console.is_terminal)
        return list(shown)


def _decode(path: Path, largest_side: int) -> Tensor:
    image = _open(path)
    try:
        image.draft("RGB", (2 * largest_side, 2 * largest_side))  # a JPEG can be read at a fraction of its size
        picture = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadInput(f"cannot read {path}: {error}; mend it or take it out") from None
    short = min(picture.size)
    if short > largest_side:
        width, height = (round(side * largest_side / short) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadInput(f"cannot read {path}: {error}; mend it or take it out") from None
