"""A folder of photos: class folders, or one flat unlabelled pile; train, val and test folders are splits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.name
        self.train_root = next((root / name for name in _TRAINING if (root / name).is_dir()), root)
        self.test_root = next((root / name for name in _TESTING if (root / name).is_dir()), None)
        if self.train_root == root:
            self.test_root = None
        self.train_paths = _images_below(self.train_root)
        if not self.train_paths:
            raise BadInput(f"no images below {self.train_root}; cmsf reads {' '.join(SUFFIXES)}")
        self.test_paths = _images_below(self.test_root) if self.test_root else []
        if self.test_root and not self.test_paths:
            raise BadInput(f"no images below {self.test_root}; fill it, or remove it to have a tenth held out")

    def typical_side(self) -> int:
        every = max(1, len(self.train_paths) // _PEEK)
        return int(statistics.median(min(_open(path).size) for path in self.train_paths[::every]))

    def load(self, largest_side: int, seed: int) -> Dataset:
        folders = _class_folders(self.train_root, self.train_paths)
        classes = tuple(sorted(set(folders)))
        train = self._split(self.train_root, self.train_paths, classes, largest_side)
        if self.test_root is None:
            return hold_out(self.name, classes, train, seed)
        test = self._split(self.test_root, self.test_paths, classes, largest_side)
        return Dataset(self.name, classes, train, test, f"{len(test)} images of {self.test_root.name}/")

    def _split(self, root: Path, paths: list[Path], classes: tuple[str, ...], largest_side: int) -> Split:
        pictures = _decode_all(paths, largest_side)
        number = {name: i for i, name in enumerate(classes)}
        truth = [number.get(folder, UNKNOWN) for folder in _class_folders(root, paths)] or [UNKNOWN] * len(paths)
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
