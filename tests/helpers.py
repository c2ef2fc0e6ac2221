"""Small rows, images and data sets made on the fly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.data import Dataset, Split
from cmsf.method.bank import MemoryBank
from cmsf.method.rows import Rows
from cmsf.utils.constants import UNKNOWN


def unit(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, dim, generator=generator, dtype=torch.float64), dim=1)


def random_rows(count: int, seed: int, dim: int = 6, classes: int = 3, unknown: float = 0.0) -> Rows:
    """Rows with labels and companions, a share of each column unknown."""
    generator = torch.Generator().manual_seed(seed + 1000)
    label = torch.randint(classes, (count,), generator=generator)
    label[torch.rand(count, generator=generator) < unknown] = UNKNOWN
    companion = unit(count, dim, seed + 1)
    companion[torch.rand(count, generator=generator) < unknown] = torch.nan
    index = torch.randperm(3 * count, generator=generator)[:count]
    return Rows(unit(count, dim, seed), index, label, companion)


def bank_of(rows: Rows) -> MemoryBank:
    """A full bank of just these rows, also of those that do not exist, in their order."""
    dims = (rows.embedding.shape[1], None if rows.companion is None else rows.companion.shape[1])
    bank = MemoryBank(len(rows), *dims, dtype=rows.embedding.dtype)
    bank.embedding.copy_(rows.embedding)
    bank.index.copy_(rows.index)
    if rows.label is not None:
        bank.label.copy_(rows.label)
    if rows.companion is not None:
        bank.companion.copy_(rows.companion)
    bank.written = len(rows)
    return bank


def images_of_classes(per_class: int, classes: int, side: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Grey images in which a class is a bright bar at its own angle, with noise: easy to learn, cheap to make."""
    generator = np.random.default_rng(seed)
    label = np.repeat(np.arange(classes), per_class)
    generator.shuffle(label)
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij")) - (side - 1) / 2
    angle = np.pi * (label + generator.normal(0, 0.08, len(label))) / classes
    distance = np.abs(np.sin(angle)[:, None, None] * grid[0] - np.cos(angle)[:, None, None] * grid[1])
    bars = np.clip(220 * (distance < side / 7) + generator.normal(20, 15, distance.shape), 0, 255)
    return bars.astype(np.uint8), label


def noise_split(count: int, seed: int) -> Split:
    """Random pixels in three classes."""
    images = torch.randint(256, (count, 3, 12, 12), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    truth = torch.arange(count) % 3
    return Split(images, [str(i) for i in range(count)], truth, truth)


def noise(train: int, test: int) -> Dataset:
    names = ("a", "b", "c")
    return Dataset("noise", names, names, noise_split(train, 0), noise_split(test, 1), f"{test} images")


def write_npz(path: Path, per_class: int = 40, classes: int = 4, side: int = 16, labelled: bool = True) -> Path:
    images, label = images_of_classes(per_class, classes, side)
    arrays = {"x": images, "y": label} if labelled else {"x": images}
    np.savez(path, **arrays)
    return path


def write_photos(folder: Path, per_class: int, classes: int, side: int = 80) -> Path:
    """A folder of JPEGs of different sizes in class folders."""
    images, label = images_of_classes(per_class, classes, side)
    for i, (pixels, number) in enumerate(zip(images, label, strict=True)):
        place = folder / f"class {number}"
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(pixels).convert("RGB").resize((side + 7 * (i % 5), side + 11 * (i % 3)))
        picture.save(place / f"{i:03d}.jpg")
    return folder


def put_into_hub_cache(state: dict[str, Tensor], name: str, cache: Path) -> None:
    """A folder as the Hugging Face Hub's client leaves it after a download."""
    commit, repository = "0123456789abcdef0123456789abcdef01234567", cache / f"models--timm--{name}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    save_file(state, snapshot / "model.safetensors")
