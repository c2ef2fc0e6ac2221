"""Images by a stable index, from files, arrays and other places, that are decoded when they are read."""

from __future__ import annotations

import errno
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Int, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from cmsf.data.decoding import decode, open_image, shrink, upright_size
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track
from cmsf.utils.text import error_message, shorten

T = TypeVar("T")
_SAMPLED = 200


class Unreadable(BadInput):
    """An image that cannot be decoded, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return unreadable_message([self])


def unreadable_message(broken: Sequence[Unreadable]) -> str:
    """Returns one line for any number of unreadable images."""
    first = "; ".join(f"{shorten(error.path, 80)}: {error.reason}" for error in broken[:3])
    first += " …" if len(broken) > 3 else ""
    count = "1 image" if len(broken) == 1 else f"{len(broken)} images"
    return f"cannot read {count} ({first}); repair what is broken, or start a new run with --skip-broken"


class Images(ABC):
    """Images by a stable index that are decoded when they are read; subclasses say where the bytes come from."""

    paths: Sequence[str]
    """A lasting name for each: the path below the source's root, or what stands in for it."""
    blocks: Int[Tensor, " n"] | None = None
    """Which block of storage each image lies in, where reading from few blocks at a time is much faster."""

    def __len__(self) -> int:
        return len(self.paths)

    @abstractmethod
    def open(self, i: int) -> Image.Image:
        """Opens an image without decoding it; may raise whatever the library beneath raises."""

    def size(self, i: int) -> tuple[int, int]:
        """Returns height and width, or raises Unreadable."""
        return self._with_image(i, upright_size)

    def decode(self, i: int, min_side: int) -> UInt8[Tensor, "3 h w"]:
        """Returns the pixels, at a fraction of the size if every side keeps `min_side`, or raises Unreadable."""
        return self._with_image(i, lambda image: decode(image, min_side))

    def _with_image(self, i: int, function: Callable[[Image.Image], T]) -> T:
        try:
            with self.open(i) as image:
                if not all(image.size):
                    raise ValueError("it has no pixels")
                return function(image)
        except (BadInput, MemoryError):  # nothing is the matter with the image, but with the way to it
            raise
        # Decoders of some thirty formats fail on damaged files in as many ways.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            reason = _reason(error)
        # Raised out here it does not hold on to the error, whose frames hold the file open.
        raise Unreadable(self.paths[i], reason)

    def sample_sizes(self) -> list[tuple[int, int]]:
        """Returns heights and widths of some hundred images, evenly spaced; unreadable ones are left out."""
        sizes = []
        sample = range(0, len(self), max(1, len(self) // _SAMPLED))
        for i in track(sample, "looking at sizes", len(sample)):
            with suppress(Unreadable):
                sizes.append(self.size(i))
        return sizes

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return SubsetImages(self, index.tolist())

    def fingerprint(self, i: int) -> bytes | None:
        """Returns what changes when the image does, without decoding it; None where nothing is known."""
        return None


class SubsetImages(Images):
    """Some of other images, at chosen indices."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self.images, self.indices = images, indices
        self.paths = [images.paths[i] for i in indices]
        self.blocks = None if images.blocks is None else images.blocks[torch.tensor(indices)]

    def open(self, i: int) -> Image.Image:
        return self.images.open(self.indices[i])

    def size(self, i: int) -> tuple[int, int]:
        return self.images.size(self.indices[i])

    def decode(self, i: int, min_side: int) -> UInt8[Tensor, "3 h w"]:
        return self.images.decode(self.indices[i], min_side)

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return SubsetImages(self.images, [self.indices[i] for i in index.tolist()])

    def fingerprint(self, i: int) -> bytes | None:
        return self.images.fingerprint(self.indices[i])


class ResizedImages(Images):
    """Images with a shorter side of at most `max_side`, as they are kept in memory."""

    def __init__(self, images: Images, max_side: int) -> None:
        self.images, self.paths, self.max_side = images, images.paths, max_side

    def open(self, i: int) -> Image.Image:
        return self.images.open(i)

    def decode(self, i: int, min_side: int) -> UInt8[Tensor, "3 h w"]:
        return shrink(self.images.decode(i, self.max_side), self.max_side)

    def fingerprint(self, i: int) -> bytes | None:
        fingerprint = self.images.fingerprint(i)
        return None if fingerprint is None else f"at most {self.max_side}: ".encode() + fingerprint


class FileImages(Images):
    """Image files below a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, paths

    def open(self, i: int) -> Image.Image:
        file = self.root / self.paths[i]
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for, and a device has no end
            raise OSError("it is not a plain file")
        return open_image(file)

    def fingerprint(self, i: int) -> bytes | None:
        return file_fingerprint(self.root / self.paths[i])


class ArrayImages(Images):
    """Images of one size, decoded already."""

    def __init__(self, tensor: UInt8[Tensor, "n c h w"], paths: Sequence[str]) -> None:
        self.tensor, self.paths = tensor, paths

    def open(self, i: int) -> Image.Image:
        pixels = self.tensor[i].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return ArrayImages(self.tensor[index], [self.paths[i] for i in index.tolist()])

    def fingerprint(self, i: int) -> bytes | None:
        return self.tensor[i].numpy().tobytes()


def file_fingerprint(file: Path) -> bytes:
    """Returns path, size and time of a file, or that there is none: whoever opens it says why."""
    try:
        state = file.stat()
    except (OSError, ValueError):  # a NUL in a name is a ValueError
        return f"{file.absolute()} is not there".encode()
    return f"{file.absolute()} {state.st_size} {state.st_mtime_ns}".encode()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown kind"
    return error_message(error)
