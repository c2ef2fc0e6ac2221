"""Images by a stable index that are decoded when they are asked for."""

from __future__ import annotations

import errno
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Int, UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from cmsf.data.decoding import decode, open_image, upright_size
from cmsf.utils.errors import BadInput
from cmsf.utils.text import first_line, shorten

T = TypeVar("T")


class Unreadable(BadInput):
    """An image that cannot be decoded, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return unreadable_message([self])


def unreadable_message(broken: Sequence[Unreadable]) -> str:
    """One line for any number of them."""
    first = "; ".join(f"{shorten(one.path, 80)}: {one.reason}" for one in broken[:3]) + (
        " …" if len(broken) > 3 else ""
    )
    count = "1 image" if len(broken) == 1 else f"{len(broken)} images"
    return f"cannot read {count} ({first}); mend what is broken, or train with --skip-broken"


class Images(ABC):
    """A pile of images. The position of an image is its index, which nothing that happens to other runs changes."""

    paths: Sequence[str]
    """A name for each that lasts: the path below the source's root, or what stands in for it."""
    blocks: Int[Tensor, " n"] | None = None
    """Which of several places each image lies in, where reading from few places at a time is much faster."""

    def __len__(self) -> int:
        return len(self.paths)

    @abstractmethod
    def open(self, i: int) -> Image.Image:
        """The image, its pixels not yet decoded; whatever the library beneath raises may come out."""

    def size(self, i: int) -> tuple[int, int]:
        """Height and width, or Unreadable."""
        return self._attempt(i, upright_size)

    def decode(self, i: int, enough: int) -> UInt8[Tensor, "3 h w"]:
        """The pixels, or Unreadable; they may be fewer than in the file as long as a side keeps `enough`."""
        return self._attempt(i, lambda image: decode(image, enough))

    def _attempt(self, i: int, what: Callable[[Image.Image], T]) -> T:
        try:
            with self.open(i) as image:
                if not all(image.size):
                    raise ValueError("it has no pixels")
                return what(image)
        except (BadInput, MemoryError):  # nothing is the matter with the image, but with the way to it
            raise
        # Decoders of some thirty formats fail on damaged files in as many ways.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            reason = _reason(error)
        # Raised out here it does not hold on to the error, whose frames hold the file open.
        raise Unreadable(self.paths[i], reason)

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return SubsetImages(self, index.tolist())

    def mark(self, i: int) -> bytes | None:
        """What changes when the image does, told without decoding it; None where nothing does."""
        return None


class SubsetImages(Images):
    """Some of other images."""

    def __init__(self, images: Images, chosen: Sequence[int]) -> None:
        self.images, self.chosen = images, chosen
        self.paths = [images.paths[i] for i in chosen]
        self.blocks = None if images.blocks is None else images.blocks[torch.tensor(chosen)]

    def open(self, i: int) -> Image.Image:
        return self.images.open(self.chosen[i])

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return SubsetImages(self.images, [self.chosen[i] for i in index.tolist()])

    def mark(self, i: int) -> bytes | None:
        return self.images.mark(self.chosen[i])


class FileImages(Images):
    """Image files below a folder."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self.root, self.paths = root, paths

    def open(self, i: int) -> Image.Image:
        file = self.root / self.paths[i]
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for, and a device has no end
            raise OSError("not a regular file")
        return open_image(file)

    def mark(self, i: int) -> bytes | None:
        file = (self.root / self.paths[i]).absolute()
        try:
            state = file.stat()
        except (OSError, ValueError):  # whoever opens it says why
            return None
        return f"{file} {state.st_size} {state.st_mtime_ns}".encode()


class ArrayImages(Images):
    """Images of one size, decoded already."""

    def __init__(self, pictures: UInt8[Tensor, "n c h w"], paths: Sequence[str]) -> None:
        self.tensor, self.paths = pictures, paths

    def open(self, i: int) -> Image.Image:
        pixels = self.tensor[i].permute(1, 2, 0).numpy()
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def subset(self, index: Int[Tensor, " m"]) -> Images:
        return ArrayImages(self.tensor[index], [self.paths[i] for i in index.tolist()])

    def mark(self, i: int) -> bytes | None:
        return self.tensor[i].numpy().tobytes()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown kind"
    return first_line(error)
