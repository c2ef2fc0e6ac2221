"""The images of the experiments with baselines: parts of Fashion-MNIST, CIFAR-10 and Tiny-ImageNet, as .npz files.

Settings are chosen on images, and a test part, that no reported figure has seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from cmsf.data import open_source
from cmsf.utils.files import atomic_write

IMAGES = 10_000
_TINY_CLASS = 50
_MAKE_SAMPLE = Path(__file__).parent.parent / "scripts" / "make_sample.py"


def fashion(data: Path, into: Path) -> Path:
    """To choose by: images outside of the embedded sample."""
    file = into / "fashion-mnist-choosing.npz"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_stem(f".{os.getpid()}")  # two processes may be at it
        made = [str(data / "fashion-mnist"), str(temporary), "--choosing", "1"]
        subprocess.run([sys.executable, str(_MAKE_SAMPLE), *made], check=True)
        temporary.replace(file)
    return file


def cifar(data: Path, into: Path, choosing: bool) -> Path:
    """The first 10,000 training images and the test images; to choose by, the next 10,000 and 5,000 after those."""
    file = into / ("cifar10-choosing.npz" if choosing else "cifar10-10000.npz")
    if not file.exists():
        whole = np.load(data / "cifar10.npz")
        x, y = whole["x_train"], whole["y_train"]
        test = (x[2 * IMAGES : 2 * IMAGES + 5000], y[2 * IMAGES : 2 * IMAGES + 5000])
        first = IMAGES if choosing else 0
        x_test, y_test = test if choosing else (whole["x_test"], whole["y_test"])
        train = slice(first, first + IMAGES)
        _save(file, x_train=x[train], y_train=y[train], x_test=x_test, y_test=y_test, classes=whole["classes"])
    return file


def tiny(data: Path, into: Path, choosing: bool = False) -> Path:
    """Fifty training images of each of the 200 classes, and all validation images to test on, at 64 px.

    To choose by: of each class the next forty training images, and the last ten to test on.
    """
    file = into / ("tiny-imagenet-choosing.npz" if choosing else "tiny-imagenet-10000.npz")
    if not file.exists():
        source = open_source(str(data / "tiny-imagenet-64"))
        arrays, number = {}, {name: i for i, name in enumerate(source.classes)}
        parts = {"train": (source.train, range(_TINY_CLASS)), "test": (source.splits["val"], range(1000))}
        if choosing:
            parts = {"train": (source.train, range(_TINY_CLASS, 90)), "test": (source.train, range(90, 100))}
        for part, (split, wanted) in parts.items():
            pictures, label, seen = [], [], dict.fromkeys(source.classes, 0)
            for i, name in enumerate(split.names):
                assert name is not None
                if seen[name] in wanted:
                    pictures.append(split.images.decode(i, 64).expand(3, -1, -1).permute(1, 2, 0).numpy())
                    label.append(number[name])
                seen[name] += 1
            arrays |= {f"x_{part}": np.stack(pictures), f"y_{part}": np.array(label)}
        _save(file, **arrays, classes=np.array(source.classes))
    return file


def _save(file: Path, **arrays: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
