"""Opens a source of images by its name; a new kind of source is a file in sources/ and a line here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from cmsf.data.source import Source
from cmsf.data.sources.folder import open_folder
from cmsf.data.sources.hugging_face import holds_images, is_saved_dataset, open_hugging_face
from cmsf.data.sources.npz import open_npz
from cmsf.data.sources.shards import open_shards, runs_command
from cmsf.data.sources.table import TABLE_SUFFIXES, open_table
from cmsf.data.sources.torchvision import is_on_disk, open_torchvision
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user

SAMPLE = "fashion-mnist-sample"
_FORMS = "a folder of images, a .csv or .parquet list, an .npz, torchvision:NAME, hf:NAME or wds:SHARDS"

_SCHEMES: dict[str, Callable[[str], Source]] = {
    "torchvision": open_torchvision,
    "hf": open_hugging_face,
    "wds": open_shards,
}
"""Sources by prefix; their libraries are imported when one is opened."""


def open_source(data: str | Path | None) -> Source:
    """Opens a source by its name, in one of the forms above; None is the embedded sample of Fashion-MNIST."""
    if data is None or str(data) == SAMPLE:
        with as_file(files("cmsf.data") / "sample" / "fashion-mnist.npz") as path:
            return open_npz(path, SAMPLE)
    scheme, colon, location = str(data).partition(":")
    if colon and scheme in _SCHEMES:
        return _SCHEMES[scheme](location)
    path = expand_user(data)
    if not os.path.exists(path):  # which a name that is too long for any file does not, and raises nothing
        if colon and scheme.isidentifier():
            raise BadInput(f"unknown source {scheme}:; {did_you_mean(scheme, _SCHEMES, f'give {_FORMS}')}")
        raise BadInput(f"no such file or folder: {path}; give {_FORMS}")
    if is_saved_dataset(path) or (path.suffix.lower() in (".parquet", ".pq") and holds_images(path)):
        return open_hugging_face(str(path))
    if path.is_dir():
        return open_folder(path)
    if path.suffix.lower() == ".npz":
        return open_npz(path)
    if path.suffix.lower() in TABLE_SUFFIXES:
        return open_table(path)
    raise BadInput(f"{path} is not a source of images; give {_FORMS}")


@dataclass(frozen=True)
class DataConfig:
    """The images, labels and test images that a user names, by names that hold in any working directory."""

    data: str
    labels: str | None = None
    val: str | None = None

    @property
    def runs_command(self) -> bool:
        """Whether opening it runs a shell command, as webdataset's pipe: does."""
        shards = [name.removeprefix("wds:") for name in (self.data, self.val or "") if name.startswith("wds:")]
        return any(runs_command(location) for location in shards)

    def missing_download(self) -> str | None:
        """Returns the source that torchvision would have to download, into a folder that its name may say."""
        sets = [name for name in (self.data, self.val or "") if name.startswith("torchvision:")]
        return next((name for name in sets if not is_on_disk(name.removeprefix("torchvision:"))), None)

    @classmethod
    def resolve(
        cls, data: str | Path | None, labels: str | Path | None = None, val: str | Path | None = None
    ) -> DataConfig:
        return cls(
            _absolute_name(data),
            None if labels is None else _absolute(labels),
            None if val is None else _absolute_name(val),
        )


def _absolute_name(data: str | Path | None) -> str:
    if data is None or str(data) == SAMPLE:
        return SAMPLE
    scheme, _, location = str(data).partition(":")
    if scheme == "torchvision":
        name, at, folder = location.partition("@")
        return f"{scheme}:{name}{at}{_absolute(folder) if at else ''}"
    if scheme == "hf":  # a name on the Hub is what it is
        return f"{scheme}:{_absolute(location) if expand_user(location).exists() else location}"
    if scheme == "wds":  # and so is a URL
        return f"{scheme}:{'::'.join(url if ':' in url else _absolute(url) for url in location.split('::'))}"
    return _absolute(data)


def _absolute(path: str | Path) -> str:
    """Returns an absolute path, with links as they are: what a list names is relative to where the list was named."""
    return os.path.abspath(expand_user(path))
