"""Make the embedded sample from the full Fashion-MNIST (Debian package dataset-fashion-mnist).

    python scripts/make_sample.py /usr/share/datasets/fashion-mnist src/cmsf/data/sample/fashion-mnist.npz

Takes the first 1,000 training and 200 test images of each class in a seeded order, and keeps that order, so that
a share of the sample is random too.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import torch

from cmsf.randomness import permutation

SEED = 20260
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def read(path: Path, header: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes())[header:], np.uint8).copy())


def chosen(label: torch.Tensor, per_class: int, part: int) -> torch.Tensor:
    order = permutation(len(label), SEED, part)
    first = torch.stack([order[label[order] == c][:per_class] for c in range(len(CLASSES))])
    return order[torch.isin(order, first)]


def main(source: Path, out: Path) -> None:
    arrays = {"classes": np.array(CLASSES)}
    for name, prefix, per_class, part in (("train", "train", 1000, 1), ("test", "t10k", 200, 2)):
        images = read(source / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        label = read(source / f"{prefix}-labels-idx1-ubyte.gz", 8)
        index = chosen(label, per_class, part)
        arrays |= {f"x_{name}": images[index].numpy(), f"y_{name}": label[index].numpy()}
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
