"""Features of images: in memory, or in a file that is made part by part, so that a process that was killed goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.data import Split, Unreadable
from cmsf.evaluation.features import BATCH, FeatureExtractor, batch_indices
from cmsf.evaluation.hashed import load_tensors, save_tensors
from cmsf.runs.embedding_files import Names, write_embeddings
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.files import make_folder, report_write_errors
from cmsf.utils.locks import hold_lock
from cmsf.utils.progress import track
from cmsf.utils.screen import Screen
from cmsf.utils.text import shorten

PART = 4 * BATCH
"""Images of a part: a process that was killed has little more than so many to compute again."""
_SUFFIX = ".safetensors"
_REMEDY = "give another --out"


@dataclass(frozen=True)
class NamedSplit:
    """A split, what it is called, and the class of each of its images, None where it has none."""

    name: str
    split: Split
    labels: Sequence[str | None]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """L2-normalised features, a row for each image, and what the images are called."""

    features: Float[Tensor, "n f"]
    paths: list[str]
    labels: list[str | None]
    splits: list[str]


@dataclass(frozen=True)
class EmbeddingFile:
    """A file that holds a row of features for each image."""

    path: Path
    rows: int
    width: int


def embed(extractor: FeatureExtractor, splits: Sequence[NamedSplit]) -> Embeddings:
    """Computes the features of images; those that cannot be read are left out, and named on standard error."""
    unreadable: list[Unreadable] = []
    parts = [list(_compute(extractor, images, _all_parts(images), unreadable)) for images in splits]
    names = _readable_names(splits, [[part.index for part in group] for group in parts], unreadable)
    features = torch.cat([part.features for group in parts for part in group])
    return Embeddings(features, names.paths, names.labels, names.splits)


def embed_to_file(
    out: Path, extractor: FeatureExtractor, splits: Sequence[NamedSplit], about: Mapping[str, Any]
) -> EmbeddingFile:
    """Does the same, and writes an .npz or a .parquet, whole or not at all.

    Until then parts are kept in a hidden folder beside it. They are named by a hash of all that they depend on, as the
    cache of evaluations is: the same call goes on where a process was killed, and parts of other weights or images go.
    """
    unreadable: list[Unreadable] = []
    with _folder_of_parts(out) as folder:
        kept = [_KeptSplit(folder, extractor, images) for images in splits]
        with report_write_errors(out, _REMEDY):
            _remove_others(folder, {file for split in kept for file in split.files})
        for split in kept:
            split.complete(out, unreadable)
        names = _readable_names(splits, [split.indices() for split in kept], unreadable)
        blocks = (block for split in kept for block in split.features())
        rows = track(blocks, f"writing {out.name}", sum(len(split.indices()) for split in kept))
        with report_write_errors(out, _REMEDY):
            write_embeddings(out, rows, extractor.width, names, about)
    return EmbeddingFile(out, len(names.paths), extractor.width)


@dataclass(frozen=True, eq=False)
class _Part:
    """Features of some successive images, of those that can be read, and their indices in the split."""

    index: Int[Tensor, " r"]
    features: Float[Tensor, "r f"]

    @property
    def number(self) -> int:
        return int(self.index[0]) // PART

    def save(self, file: Path) -> None:
        save_tensors(file, {"index": self.index, "features": self.features})

    @classmethod
    def load(cls, file: Path, images: Int[Tensor, " n"], width: int) -> _Part | None:
        """Returns what was saved of these images; None where there is nothing, or something else."""
        stored = load_tensors(file) or {}
        if stored.keys() != {"index", "features"}:
            return None
        index, features = stored["index"], stored["features"]
        rows = index.numel()
        if (index.dtype, features.dtype) != (torch.int64, torch.float32) or not rows:
            return None
        if index.shape != (rows,) or features.shape != (rows, width) or not torch.isin(index, images).all():
            return None
        return cls(index, features)


class _KeptSplit:
    """The parts of a split, each in a file of its own."""

    def __init__(self, folder: Path, extractor: FeatureExtractor, images: NamedSplit) -> None:
        # Of images of which nothing is known beforehand, no part is found again.
        key = extractor.key(images.split.fingerprint() or token_hex())
        self.extractor, self.images, self.parts = extractor, images, _all_parts(images)
        self.files = [folder / f"{key}-{number:06}{_SUFFIX}" for number in range(len(self.parts))]
        self._index: dict[int, Tensor] = {}

    def complete(self, out: Path, unreadable: list[Unreadable]) -> None:
        """Computes the parts that are not there yet."""
        for number in track(range(len(self.files)), "reading parts", len(self.files)):
            part = self._load(number)
            if part is not None:
                self._index[number] = part.index
        if self._index:
            done, total = sum(map(len, self._index.values())), len(self.images.split)
            Screen().print(f"{done:,} of {total:,} images of {self.images.name} were embedded before; going on")
        missing = [images for number, images in enumerate(self.parts) if number not in self._index]
        for part in _compute(self.extractor, self.images, missing, unreadable):
            with report_write_errors(out, _REMEDY):
                part.save(self.files[part.number])
            self._index[part.number] = part.index

    def indices(self) -> list[Int[Tensor, " r"]]:
        """Returns which images each part has, but for parts of which no image can be read."""
        return [self._index[number] for number in sorted(self._index)]

    def features(self) -> Iterator[Float[Tensor, "r f"]]:
        """Yields the features of these images, part by part."""
        for number in sorted(self._index):
            part = self._load(number)
            if part is None or not torch.equal(part.index, self._index[number]):
                raise BadInput(f"{self.files[number]} has changed while it was needed; give the same command again")
            yield part.features

    def _load(self, number: int) -> _Part | None:
        return _Part.load(self.files[number], self.parts[number], self.extractor.width)


def _all_parts(images: NamedSplit) -> list[Int[Tensor, " n"]]:
    """Returns the indices of the images of each part."""
    return [part for part in torch.arange(len(images.split)).split(PART) if len(part)]


def _compute(
    extractor: FeatureExtractor,
    images: NamedSplit,
    parts: Sequence[Int[Tensor, " _"]],
    unreadable: list[Unreadable],
) -> Iterator[_Part]:
    """Yields some parts, but for those of which no image can be read, and collects what cannot."""
    batches = [batch for part in parts for batch in batch_indices(part)]
    total = sum(map(len, parts))
    rows = extractor.stream(images.split, batches, lambda _, error: unreadable.append(error))
    for _, group in groupby(track(rows, "features", total, BATCH), key=lambda row: int(row[0][0]) // PART):
        index, features = zip(*group, strict=True)
        yield _Part(torch.cat(index), torch.cat(features))


def _readable_names(
    splits: Sequence[NamedSplit], indices: Sequence[Sequence[Tensor]], unreadable: Sequence[Unreadable]
) -> Names:
    """Returns what the images with these indices are called; says which are left out, and refuses to leave out all."""
    names, left_out = Names([], [], []), []
    for images, blocks in zip(splits, indices, strict=True):
        readable = [i for block in blocks for i in block.tolist()]
        paths = images.split.paths
        names.paths.extend(paths[i] for i in readable)
        names.labels.extend(images.labels[i] for i in readable)
        names.splits.extend([images.name] * len(readable))
        left_out += [paths[i] for i in sorted({*range(len(paths))} - {*readable})]
    total = len(names.paths) + len(left_out)
    if not names.paths:
        first = unreadable[0]
        raise BadInput(f"none of {total:,} images can be read (the first is {first.path}: {first.reason}); repair them")
    if left_out:
        some = first_few([shorten(path, 80) for path in left_out], 3, ", ")
        Screen().print(f"left out, for they cannot be read: {len(left_out):,} of {total:,} images ({some})")
    return names


@contextmanager
def _folder_of_parts(out: Path) -> Iterator[Path]:
    """Yields a folder, locked, for the parts of a file; it stays where the block fails and has left parts in it."""
    folder = out.with_name(f".{out.name}.parts")
    with report_write_errors(out, _REMEDY):
        make_folder(folder)
    with hold_lock(folder / ".lock", f"{out} is being written"):
        succeeded = False
        try:
            yield folder
            succeeded = True
        finally:
            if succeeded or not any(folder.glob(f"*{_SUFFIX}")):
                shutil.rmtree(folder, ignore_errors=True)


def _remove_others(folder: Path, parts: set[Path]) -> None:
    """Removes what earlier calls have left, but for these parts."""
    for file in folder.iterdir():
        if file not in parts and file.name != ".lock":
            file.unlink()
