"""What is damaged: real small files and runs, made once."""

from __future__ import annotations

import shutil
import signal
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from helpers import images_of_classes, write_npz
from PIL import Image
from runs import StopAt

import cmsf
from cmsf.training.signals import Stopped

SETTINGS = {
    "epochs": 1,
    "batch_size": 8,
    "projection_hidden": 8,
    "projection_dim": 4,
    "evaluate_every": 0,
    "cache": "ram",
}
_KINDS = {
    "png": {},
    "jpeg": {},
    "gif": {},
    "bmp": {},
    "tiff": {},
    "webp": {},
    "ppm": {},
    "tga": {},
    "jpeg2000": {},
    "avif": {},
}


@dataclass(frozen=True)
class Stock:
    """path: where all of it lies; images: the bytes of one picture by its kind."""

    path: Path
    images: dict[str, bytes]

    @property
    def arrays(self) -> Path:
        return self.path / "bars.npz"

    @property
    def photos(self) -> Path:
        return self.path / "photos"

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def classifier(self) -> Path:
        return self.path / "classifier"

    @property
    def stopped(self) -> Path:
        return self.path / "stopped"

    @property
    def shard(self) -> bytes:
        return (self.path / "shard.tar").read_bytes()


def make_stock(path: Path) -> Stock:
    torch.set_num_threads(1)
    path.mkdir(parents=True, exist_ok=True)
    stock = Stock(path, {kind: _picture(kind) for kind in _KINDS})
    write_npz(stock.arrays, per_class=8, classes=3, side=16)
    for place, number in enumerate((0, 0, 1, 1, 2, 2)):
        file = stock.photos / f"class{number}" / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_picture("png", place))
    cmsf.train("cmsf-sup-small", stock.arrays, stock.run, quiet=True, workers=0, **SETTINGS)
    cmsf.finetune(stock.run, out=stock.classifier, tune="whole", epochs=1, workers=0, quiet=True)
    stop_in_the_middle(stock)
    with tarfile.open(path / "shard.tar", "w") as archive:
        for number in range(4):
            for ending, content in (("png", _picture("png", number)), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number:04d}.{ending}")
                member.size = len(content)
                archive.addfile(member, BytesIO(content))
    return stock


def stop_in_the_middle(stock: Stock) -> None:
    """A run with checkpoints at the end of its first epoch and within its second."""
    try:
        go_on(stock.arrays, stock.stopped, StopAt(4, signal.SIGTERM))
    except Stopped:
        return
    raise AssertionError("the run was not stopped")


def go_on(arrays: Path, run: Path, screen: StopAt | None = None) -> None:
    settings = SETTINGS | {"epochs": 2, "log_every": 1}
    cmsf.train("cmsf-self-small", arrays, run, quiet=True, workers=0, screen=screen, **settings)


def copied(place: Path, into: Path) -> Path:
    shutil.copytree(place, into)
    return into


def _picture(kind: str, seed: int = 0) -> bytes:
    grey = images_of_classes(1, 2, 24, seed)[0][0]
    made = BytesIO()
    Image.fromarray(np.stack([grey, grey[::-1], grey.T], axis=2)).save(made, format=kind)
    return made.getvalue()
