"""Cut samples out of the full Fashion-MNIST (Debian package dataset-fashion-mnist).

    python scripts/make_sample.py /usr/share/datasets/fashion-mnist src/cmsf/data/sample/fashion-mnist.npz
    python scripts/make_sample.py /usr/share/datasets/fashion-mnist choosing-1.npz --choosing 1

The first makes the embedded sample: in a seeded order, the first 1,000 training and the first 200 test images of each
class. The second makes data to choose recipes on: it has as many training images and 10,000 test images, all of them
training images outside of the sample, so that the sample's test images decide nothing. --choosing 1 and 2 have no
image in common.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch

from cmsf.utils.rng import permutation

SEED = 20260
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
A_CLASS = 1000


def read(source: Path, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    def numbers(name: str, header: int) -> torch.Tensor:
        packed = gzip.decompress((source / f"{prefix}-{name}-ubyte.gz").read_bytes())
        return torch.from_numpy(np.frombuffer(packed[header:], np.uint8).copy())

    return numbers("images-idx3", 16).reshape(-1, 28, 28), numbers("labels-idx1", 8)


def balanced(label: torch.Tensor, key: int, first: int, count: int) -> torch.Tensor:
    """Of each class the images first … first + count of a seeded order, all in that order."""
    order = permutation(len(label), SEED, key)
    of_class = [order[label[order] == number][first : first + count] for number in range(len(CLASSES))]
    return order[torch.isin(order, torch.cat(of_class))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--choosing", type=int, choices=(1, 2))
    chosen = parser.parse_args()
    images, label = read(chosen.source, "train")
    if chosen.choosing is None:
        train = balanced(label, 1, 0, A_CLASS)
        test_images, test_label = read(chosen.source, "t10k")
        test = balanced(test_label, 2, 0, A_CLASS // 5)
    else:
        first = (2 * chosen.choosing - 1) * A_CLASS
        train, test = balanced(label, 1, first, A_CLASS), balanced(label, 1, first + A_CLASS, A_CLASS)
        test_images, test_label = images, label
    np.savez_compressed(
        chosen.out,
        classes=np.array(CLASSES),
        x_train=images[train].numpy(),
        y_train=label[train].numpy(),
        x_test=test_images[test].numpy(),
        y_test=test_label[test].numpy(),
    )


if __name__ == "__main__":
    main()
