"""From what a user calls the data to a source of images."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from cmsf.data.arrays import Arrays
from cmsf.data.dataset import Source
from cmsf.data.folder import Folder
from cmsf.errors import BadInput

SAMPLE = "fashion-mnist-sample"


def open_source(data: str | Path | None) -> Source:
    """A folder of images, an .npz of arrays, or with nothing given the embedded sample of Fashion-MNIST."""
    if data is None or str(data) == SAMPLE:
        with as_file(files("cmsf.data") / "sample" / "fashion-mnist.npz") as path:
            return Arrays(path, SAMPLE)
    path = Path(data).expanduser()
    if not path.exists():
        raise BadInput(f"there is no {path}; give a folder of images or an .npz, or leave --data out for the sample")
    if path.is_dir():
        return Folder(path)
    if path.suffix == ".npz":
        return Arrays(path)
    raise BadInput(f"{path} is neither a folder of images nor an .npz of arrays")
