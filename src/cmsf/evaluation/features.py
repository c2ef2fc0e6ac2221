"""Pooled features of clean views, on which every evaluation rests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.data import Split, load_batches
from cmsf.data.transforms import CenterCrop, normalize_pixels
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, make_folder
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
    size: int
    device: torch.device | str = "cpu"
    workers: int = 0
    cache: Path | None = None

    def __call__(self, split: Split) -> Float[Tensor, "n f"]:
        fingerprint = None if self.cache is None else split.fingerprint()
        if self.cache is None or fingerprint is None:
            return self._extract(split)
        device = torch.device(self.device).type
        key = [_FORMAT, self.network, fingerprint, self.transform, LAYER, device, torch.__version__]
        file = self.cache / f"{sha256(json.dumps(key).encode()).hexdigest()[:32]}.safetensors"
        features = _read(file)
        if features is None:
            features = self._extract(split)
            try:
                make_folder(self.cache)
                with atomic_write(file) as temporary:
                    save_file({"features": features.cpu()}, temporary, metadata={"sha256": _digest(features.cpu())})
            except OSError as error:  # the next evaluation computes them again
                print(one_line(f"features are not cached in {self.cache}: {error.strerror}"), file=sys.stderr)
        return features.to(self.device)

    @cached_property
    def network(self) -> str:
        """A hash of the network's structure and weights."""
        digest = sha256(repr(self.backbone).encode())
        state = self.backbone.state_dict()
        for name, value in track(state.items(), "hashing weights", len(state)):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def transform(self) -> str:
        return transform_name(self.size)

    def _extract(self, split: Split) -> Float[Tensor, "n f"]:
        batches = feature_batches(self.backbone, split, self.size, self.device, self.workers)
        features, done = torch.empty(0), 0
        for batch in track(batches, "features", batch_count(split)):
            if not done:  # memory for all at once: at ImageNet's size there is none for two copies
                features = batch.new_empty(len(split), batch.shape[1])
            features[done : done + len(batch)] = batch
            done += len(batch)
        broken = sum(int((~block.isfinite().all(1)).sum()) for block in features.split(BATCH))
        if broken:
            raise BadInput(f"the features of {broken} of {len(split)} images have NaN or inf: the network has diverged")
        return features


def feature_batches(
    backbone: nn.Module, split: Split, size: int, device: torch.device | str = "cpu", workers: int = 0
) -> Iterator[Tensor]:
    """Yields features of batches that are always the same, so that evaluations during and after training agree."""
    with eval_mode(backbone):
        for views in clean_views(split, size, device, workers):
            yield unit_features(backbone, views)


@torch.no_grad()
def unit_features(backbone: nn.Module, views: Float[Tensor, "b 3 s s"]) -> Float[Tensor, "b f"]:
    """Returns L2-normalised features in single precision, though a network may compute in double."""
    dtype = next((weight.dtype for weight in backbone.parameters()), torch.float32)
    return normalize(backbone(views.to(dtype)).float(), dim=1)


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[nn.Module]:
    """Puts the network into eval mode, and back into the mode it was in."""
    training = network.training
    try:
        yield network.eval()
    finally:
        network.train(training)


def raw_pixels(split: Split, size: int, workers: int = 0) -> Float[Tensor, "n f"]:
    """Returns the L2-normalised images themselves as features: the baseline of a representation."""
    return torch.cat(list(track(pixel_batches(split, size, workers), "raw pixels", batch_count(split))))


def pixel_batches(split: Split, size: int, workers: int = 0) -> Iterator[Tensor]:
    for views in clean_views(split, size, "cpu", workers):
        yield normalize(views.flatten(1), dim=1)


def batch_count(split: Split) -> int:
    return -(-len(split) // BATCH)


def transform_name(size: int) -> str:
    return f"resize {round(size * 256 / 224)}, centre crop {size}; images with no side above {size} px whole"


def clean_views(split: Split, size: int, device: torch.device | str, workers: int) -> Iterator[Tensor]:
    crop = CenterCrop(size)
    plan = ((0, index) for index in torch.arange(len(split)).split(BATCH))
    for batch in load_batches(split, plan, {0: crop}, seed=0, device=device, workers=workers):
        yield normalize_pixels(batch.crop(crop, 0))


def _read(file: Path) -> Float[Tensor, "n f"] | None:
    """Returns the cached features; None where there are none, or the file is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            features: Tensor = opened.get_tensor("features")
            written = (opened.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    return features if _digest(features) == written else None


def _digest(features: Float[Tensor, "n f"]) -> str:
    return sha256(features.contiguous().numpy().data).hexdigest()
