"""torchvision's image classification sets by name: `torchvision:CIFAR10`, `torchvision:CIFAR10@/data/sets`.

Its loaders of CIFAR unpickle archives, after they have checked their md5: the one exception to loading no pickle.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from operator import index as whole_number
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cmsf.data.images import ArrayImages, FileImages, Images, file_fingerprint
from cmsf.data.source import Source, SourceSplit, all_classes, disambiguate
from cmsf.data.sources.npz import to_images
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user
from cmsf.utils.progress import bars_enabled, progress_bar, track
from cmsf.utils.text import error_message

_SPLITS = {
    "train": ("train+unlabeled", "train", "trainval", "train-standard", "2021_train"),
    "val": ("val", "valid", "2021_valid"),
    "test": ("test",),
}
"""What sets call their splits, the first that a set knows. Only STL10 has images without labels to add."""
_SWITCHES = ("split", "image_set", "version")
_SETTINGS: dict[str, dict[str, Any]] = {"EMNIST": {"split": "balanced"}}
"""Where `split` is which of several sets, and `train` is the split."""
_NO_SETS = ("VisionDataset", "ImageFolder", "LSUN", "LSUNClass")


def open_torchvision(spec: str) -> Source:
    """Opens NAME or NAME@FOLDER; what is not in the folder is downloaded to it."""
    dataset = _Set.parse(spec)
    name = dataset.name
    if name not in _sets():
        same_letters = [known for known in _sets() if known.lower() == name.lower()]
        remedy = did_you_mean((same_letters or [name])[0], _sets(), "its documentation lists them")
        raise BadInput(f"torchvision has no set called {name!r}; {remedy}")
    opened = {split: opened_split for split in _SPLITS if (opened_split := _open(dataset, split)) is not None}
    splits = {split: _read(chosen, content, split) for split, (chosen, content) in opened.items()}
    known = [label for _, content in opened.values() for label in _class_names(content)]
    blank = [split for split, images in splits.items() if not any(images.names)]
    notes = (f"the {' and '.join(blank)} images of torchvision:{name} come without classes",) if blank else ()
    return Source(name, splits, all_classes(splits, known), notes)


def is_on_disk(spec: str) -> bool:
    """Returns whether NAME or NAME@FOLDER can be opened without a download."""
    dataset = _Set.parse(spec)
    if dataset.root.is_dir():  # some would make it
        with suppress(Exception):  # missing and damaged files make sixty loaders raise what they like
            dataset.make()
            return True
    return False


def default_root() -> Path:
    """Returns where sets are kept unless a folder is given."""
    return expand_user(os.environ.get("CMSF_DATA") or "~/.cache/cmsf") / "torchvision"


@dataclass(frozen=True)
class _Set:
    """The arguments that make one split of a set, in this process or another."""

    name: str
    root: Path
    chosen: tuple[str, Any] | None = None
    """The parameter that chooses the split, and its value."""

    @classmethod
    def parse(cls, spec: str) -> _Set:
        name, _, folder = spec.partition("@")
        return cls(name, expand_user(folder) if folder else default_root())

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return _parameters(_sets()[self.name])

    def make(self, download: bool = False) -> Any:
        # A loader that loads nothing: images then come as paths, for cmsf to decode.
        offered = {"root": str(self.root), "loader": Path, "download": download}
        settings = {key: value for key, value in offered.items() if key in self.parameters}
        chosen = {} if self.chosen is None else dict([self.chosen])
        return _sets()[self.name](**settings, **_SETTINGS.get(self.name, {}), **chosen)


class SetImages(Images):
    """Images that only the set itself can open; every process makes its own set."""

    def __init__(self, chosen: _Set, content: Any, paths: Sequence[str]) -> None:
        self.chosen, self.content, self.paths = chosen, content, paths
        self._lock = Lock()

    def open(self, i: int) -> Image.Image:
        with self._lock:  # sets promise nothing of threads
            if self.content is None:
                self.content = self.chosen.make()
            picture = self.content[i][0]
        if not isinstance(picture, Image.Image):
            raise TypeError(f"the set gave a {type(picture).__name__}, no image")
        return picture

    def fingerprint(self, i: int) -> bytes | None:
        """Returns that of the file that the set opens; a set that decodes images at once does not say which."""
        with suppress(Exception):  # whoever opens it for its pixels says why
            file = Path(getattr(self.open(i), "filename", ""))
            return file_fingerprint(file) if file.is_file() else None
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return SetImages, (self.chosen, None, self.paths)


@cache
def _sets() -> dict[str, Any]:
    """Returns the sets that can be made from a folder and a split alone."""
    module = import_module("torchvision.datasets")
    sets = {name: getattr(module, name) for name in module.__all__ if name not in _NO_SETS}
    return {
        name: kind
        for name, kind in sets.items()
        if isinstance(kind, type)
        and all(
            key == "root" or key in _SETTINGS.get(name, {}) or parameter.default is not parameter.empty
            for key, parameter in _parameters(kind).items()
        )
    }


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a set, with those that are passed on to the class above."""
    merged: dict[str, inspect.Parameter] = {}
    for above in kind.__mro__:
        parameters = inspect.signature(above.__init__).parameters
        named = {key: value for key, value in parameters.items() if value.kind == value.POSITIONAL_OR_KEYWORD}
        merged = named | merged
        if not any(value.kind == value.VAR_KEYWORD for value in parameters.values()):
            break
    return {key: value for key, value in merged.items() if key != "self"}


def _open(dataset: _Set, split: str) -> tuple[_Set, Any] | None:
    """Opens one split of a set, or None if it has no such split; a set without splits is training images."""
    if "train" in dataset.parameters:
        chosen = replace(dataset, chosen=("train", split == "train"))
        return None if split == "val" else (chosen, _content(chosen))
    switch = next((key for key in _SWITCHES if key in dataset.parameters), None)
    if switch is None:
        return (dataset, _content(dataset)) if split == "train" else None
    for value in _SPLITS[split]:
        chosen = replace(dataset, chosen=(switch, value))
        with suppress(_NoSuchSplit):
            return chosen, _content(chosen)
    if split == "train":
        raise BadInput(f"torchvision:{dataset.name} has no split for training that cmsf knows")
    return None


class _NoSuchSplit(Exception):
    pass


def _content(chosen: _Set) -> Any:
    """Returns torchvision's object, from the files that are there or else by download."""
    can_download = "download" in chosen.parameters
    for download in (False, True) if can_download else (False,):
        try:
            with _progress(chosen.name, download):
                return chosen.make(download)
        except ImportError as error:
            package = str(error.name).split(".")[0]
            raise BadInput(f"torchvision:{chosen.name} needs {package}: pip install {package}") from None
        # Missing and damaged files make sixty loaders raise what they like.
        except Exception as error:
            if isinstance(error, ValueError) and chosen.chosen is not None and f"'{chosen.chosen[1]}'" in str(error):
                raise _NoSuchSplit from None
            reason = error_message(error)
    failed = "cannot be downloaded" if can_download else "torchvision does not download it"
    raise BadInput(
        f"torchvision:{chosen.name} is not at {chosen.root} and {failed} ({reason}); "
        f"put its files there, or name their folder: torchvision:{chosen.name}@FOLDER"
    )


@contextmanager
def _progress(name: str, download: bool) -> Iterator[None]:
    """Shows torchvision's own bars of a download on a terminal, and else ours alone."""
    if download and bars_enabled():
        yield
        return
    theirs = redirect_stderr(io.StringIO()) if download else nullcontext()
    with progress_bar(f"opening torchvision:{name}", None), theirs:
        yield


def _read(chosen: _Set, content: Any, split: str) -> SourceSplit:
    """Reads the images of a split in the fastest way there is."""
    if not len(content):
        raise BadInput(f"torchvision:{chosen.name} at {chosen.root} holds no {split} images")
    first = content[0]
    if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], Image.Image | Path)):
        raise BadInput(f"torchvision:{chosen.name} is not an image classification set")
    files = _files(content)
    if files:
        # Some sets list a folder in whatever order the disk gives.
        files.sort(key=itemgetter(0))
        paths = [Path(os.path.relpath(path, chosen.root)).as_posix() for path, _ in files]
        images: Images = FileImages(chosen.root, paths)
        numbers = [number for _, number in files]
    else:
        images = _arrays(content, split) or SetImages(chosen, content, [f"{split}/{i}" for i in range(len(content))])
        numbers = _numbers(content)
    called = dict(enumerate(_class_names(content)))
    return SourceSplit(images, [None if number is None else called.get(number, str(number)) for number in numbers])


def _files(content: Any) -> list[tuple[str, int | None]]:
    """Returns paths and classes, where images are files; else nothing."""
    if isinstance(content[0][0], Path):
        items: Iterable[Any] = (content[i] for i in range(len(content)))
    elif hasattr(content, "_images") and hasattr(content, "_labels"):
        items = zip(content._images, content._labels, strict=True)
    else:
        items = getattr(content, "_samples", ())
    files = [(str(path), _number(target)) for path, target in items if isinstance(path, str | Path)]
    return files if len(files) == len(content) else []


def _arrays(content: Any, split: str) -> ArrayImages | None:
    """Returns the images as one array, if the set has one that shows what the set shows."""
    if not hasattr(getattr(content, "data", None), "shape"):
        return None
    data: NDArray[Any] = np.asarray(content.data)
    if data.dtype != np.uint8 or data.ndim not in (3, 4) or len(data) != len(content):
        return None
    if data.ndim == 4 and data.shape[3] not in (1, 3):
        data = data.transpose(0, 2, 3, 1)
    images = to_images(data, split)
    same = all(np.array_equal(np.asarray(images.open(i)), np.asarray(content[i][0])) for i in (0, len(content) - 1))
    return images if same else None


def _numbers(content: Any) -> list[int | None]:
    """Returns each image's class; asking for them one by one opens every image, so that comes last."""
    count = len(content)
    first, last = content[0][1], content[count - 1][1]
    if first is not None and _number(first) is None and _number(last) is None:
        return [None] * count  # boxes, captions, attributes
    for key in ("targets", "labels", "y"):
        listed = getattr(content, key, ())
        numbers = [_number(target) for target in (listed.tolist() if hasattr(listed, "tolist") else listed)]
        if len(numbers) == count and (numbers[0], numbers[-1]) == (_number(first), _number(last)):
            return numbers
    return [_number(content[i][1]) for i in track(range(count), "reading labels", count)]


def _number(target: Any) -> int | None:
    """Returns the class, if the target is one."""
    try:
        number = whole_number(target)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


def _class_names(content: Any) -> tuple[str, ...]:
    """Returns the names by number; of a class with several names the first."""
    by_name = getattr(content, "class_to_idx", {})
    listed = (getattr(content, key, None) for key in ("classes", "categories", "all_categories"))
    names = next(filter(None, listed), sorted(by_name, key=by_name.__getitem__))
    return disambiguate([name if isinstance(name, str) else str(name[0]) for name in names])
