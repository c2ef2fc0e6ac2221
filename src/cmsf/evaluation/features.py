"""Pooled features of clean views, on which every evaluation rests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.data import Split, Unreadable, load_batches
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation.hashed import load_tensors, save_tensors
from cmsf.models.backbones import feature_width
from cmsf.utils.errors import BadInput
from cmsf.utils.files import make_folder
from cmsf.utils.progress import track
from cmsf.utils.text import one_line

LAYER = "pooled backbone features, L2-normalised"
BATCH = 256
_FORMAT = 1


@dataclass(eq=False)
class FeatureExtractor:
    """Computes a network's L2-normalised features of clean views; with a cache folder, once for the same images.

    A file of the cache is named by a hash of all that the features depend on: the network and its weights, the images,
    the transform, the kind of device. It has a hash of its content, so a damaged file is computed again.
    """

    backbone: nn.Module
    preprocessing: Preprocessing
    device: torch.device | str = "cpu"
    workers: int = 0
    cache: Path | None = None
    _remembered: list[tuple[Any, Tensor]] | None = field(default=None, init=False, repr=False)

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keeps the features of images that are asked for again, while the network stays as it is."""
        self._remembered = []
        try:
            yield
        finally:
            self._remembered = None

    def __call__(self, split: Split) -> Float[Tensor, "n f"]:
        if self._remembered is None:
            return self._load_or_extract(split)
        for images, features in self._remembered:
            if images is split.images:
                return features
        features = self._load_or_extract(split)
        self._remembered.append((split.images, features))
        return features

    def _load_or_extract(self, split: Split) -> Float[Tensor, "n f"]:
        fingerprint = None if self.cache is None else split.fingerprint()
        if self.cache is None or fingerprint is None:
            return self._extract(split)
        file = self.cache / f"{self.key(fingerprint)}.safetensors"
        stored = load_tensors(file)
        if stored is not None and "features" in stored:
            return stored["features"].to(self.device)
        features = self._extract(split)
        try:
            make_folder(self.cache)
            save_tensors(file, {"features": features.cpu()})
        except OSError as error:  # the next evaluation computes them again
            print(one_line(f"features are not cached in {self.cache}: {error.strerror}"), file=sys.stderr)
        return features.to(self.device)

    def key(self, fingerprint: str) -> str:
        """Returns a hash of all that the features of images with this fingerprint depend on."""
        device = torch.device(self.device).type
        key = [_FORMAT, self.network, fingerprint, self.preprocessing.key, LAYER, device, torch.__version__]
        return sha256(json.dumps(key).encode()).hexdigest()[:32]

    def stream(
        self,
        split: Split,
        batches: Iterable[Int[Tensor, " _"]],
        on_unreadable: Callable[[int, Unreadable], None],
    ) -> Iterator[tuple[Int[Tensor, " r"], Float[Tensor, "r f"]]]:
        """Yields indices and features of the images of each batch that can be read, on the CPU; others are passed on.

        Batches of `batch_indices` give what a call gives, bit for bit, where all can be read.
        """
        with eval_mode(self.backbone):
            for index, views in clean_batches(
                split, batches, self.preprocessing, self.device, self.workers, on_unreadable
            ):
                features = unit_features(self.backbone, views).cpu()
                _check_finite(features)
                yield index, features

    @cached_property
    def network(self) -> str:
        """A hash of the network's structure and weights."""
        digest = sha256(repr(self.backbone).encode())
        state = self.backbone.state_dict()
        for name, value in track(state.items(), "hashing weights", len(state)):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def width(self) -> int:
        """The number of features of an image."""
        return feature_width(self.backbone, type(self.backbone).__name__, self.size)

    @property
    def size(self) -> int:
        return self.preprocessing.size

    @property
    def transform(self) -> str:
        return self.preprocessing.transform

    def protocol(self, *splits: Split) -> dict[str, Any]:
        """Returns what a result on features of these images records of their views."""
        return view_protocol(self.preprocessing, *splits)

    def _extract(self, split: Split) -> Float[Tensor, "n f"]:
        batches = feature_batches(self.backbone, split, self.preprocessing, self.device, self.workers)
        features, done = torch.empty(0), 0
        for batch in track(batches, "features", len(split), BATCH):
            if not done:  # memory for all at once: at ImageNet's size there is none for two copies
                features = batch.new_empty(len(split), batch.shape[1])
            features[done : done + len(batch)] = batch
            done += len(batch)
        _check_finite(features)
        return features


def feature_batches(
    backbone: nn.Module,
    split: Split,
    preprocessing: Preprocessing,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> Iterator[Tensor]:
    """Yields features of batches that are always the same, so that evaluations during and after training agree."""
    with eval_mode(backbone):
        for views in clean_views(split, preprocessing, device, workers):
            yield unit_features(backbone, views)


@torch.no_grad()
def unit_features(backbone: nn.Module, views: Float[Tensor, "b 3 s s"]) -> Float[Tensor, "b f"]:
    """Returns L2-normalised features in single precision, though a network may compute in double."""
    dtype = next((weight.dtype for weight in backbone.parameters()), torch.float32)
    return normalize(backbone(views.to(dtype)).float(), dim=1)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[nn.Module]:
    """Puts the network into eval mode, and each of its modules back into the mode it was in."""
    training = [module for module in network.modules() if module.training]
    try:
        yield network.eval()
    finally:
        for module in training:
            module.training = True


def raw_pixels(split: Split, preprocessing: Preprocessing, workers: int = 0) -> Float[Tensor, "n f"]:
    """Returns the L2-normalised images themselves as features: the baseline of a representation."""
    return torch.cat(list(track(pixel_batches(split, preprocessing, workers), "raw pixels", len(split), BATCH)))


def pixel_batches(split: Split, preprocessing: Preprocessing, workers: int = 0) -> Iterator[Tensor]:
    for views in clean_views(split, preprocessing, "cpu", workers):
        yield normalize(views.flatten(1), dim=1)


def view_protocol(preprocessing: Preprocessing, *splits: Split) -> dict[str, Any]:
    """Returns what a result on clean views of these images records: in words, and in numbers to repeat them by."""
    kinds = {not isinstance(split.images, Tensor) for split in splits} or {True}  # views cut one by one are rounded
    rounded = kinds.pop() if len(kinds) == 1 else "but for images of one size in memory"
    return {"transform": preprocessing.transform, "preprocessing": preprocessing.report() | {"rounded": rounded}}


def batch_indices(index: Int[Tensor, " n"]) -> tuple[Int[Tensor, " _"], ...]:
    """Returns images batch by batch, as every evaluation takes them."""
    batches: tuple[Tensor, ...] = index.split(BATCH)
    return batches


def clean_views(
    split: Split, preprocessing: Preprocessing, device: torch.device | str, workers: int
) -> Iterator[Tensor]:
    for _, views in clean_batches(split, batch_indices(torch.arange(len(split))), preprocessing, device, workers):
        yield views


def clean_batches(
    split: Split,
    batches: Iterable[Int[Tensor, " _"]],
    preprocessing: Preprocessing,
    device: torch.device | str,
    workers: int,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
) -> Iterator[tuple[Int[Tensor, " r"], Float[Tensor, "r 3 s s"]]]:
    """Yields indices and views of the images of each batch; on_unreadable: as for `load_batches`."""
    crop = preprocessing.center_crop()
    plan = ((0, index) for index in batches)
    loaded = load_batches(split, plan, {0: crop}, seed=0, device=device, workers=workers, on_unreadable=on_unreadable)
    for batch in loaded:
        yield batch.index, preprocessing.normalize(batch.crop(crop, 0))


def _check_finite(features: Float[Tensor, "n f"]) -> None:
    broken = sum(int((~block.isfinite().all(1)).sum()) for block in features.split(BATCH))
    if broken:
        raise BadInput(f"the features of {broken} of {len(features)} images have NaN or inf: the network has diverged")
