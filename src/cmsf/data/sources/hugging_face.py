"""Data sets of the `datasets` library: by name on the Hub, saved to a folder, or as Parquet files.

No code that comes with a data set is ever run: `datasets` runs none from version 4 on, and older ones only with a
consent that cmsf does not give.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from cmsf.data.decoding import open_image
from cmsf.data.images import Images
from cmsf.data.source import SPLIT_ALIASES, Source, SourceSplit, all_classes, disambiguate
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.progress import bars_enabled, progress_bar
from cmsf.utils.text import first_line

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "class", "fine_label")


def open_hugging_face(spec: str) -> Source:
    """Opens NAME or NAME@CONFIG on the Hub, a folder or a Parquet file."""
    library = _datasets()
    name, config = _split_name(spec)
    try:
        # On a terminal the library has bars of its own.
        with nullcontext() if bars_enabled() else progress_bar(f"opening hf:{name}", None):
            loaded = _load(library, name, config)
    # Hub, network, builders and file formats fail in their own ways, and each says what is the matter.
    except Exception as error:
        raise BadInput(f"cannot open hf:{spec}: {first_line(error, 200)}") from None
    by_split = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    chosen, notes = _choose_splits(spec, {split: rows for split, rows in by_split.items() if len(rows)})
    splits: dict[str, SourceSplit] = {}
    classes: list[str] = []
    for split, content in chosen.items():
        image = _image_column(library, content)
        if image is None:
            raise BadInput(f"hf:{spec} has the columns {', '.join(content.column_names)}, and none of images")
        label = _label_column(library, content)
        names, known = ([None] * len(content), ()) if label is None else _names(content, label)
        classes += known
        rows = content.select_columns([image]).cast_column(image, library.Image(decode=False))
        splits[split] = SourceSplit(TableImages(rows, image, _paths(rows, image, split, Path(name))), names)
        if label is None and split == "train":
            notes += (f"hf:{spec} has no column of classes ({', '.join(content.column_names)}), so it is unlabelled",)
    return Source(Path(name).name, splits, all_classes(splits, classes), notes)


def is_saved_dataset(path: Path) -> bool:
    """Returns whether `save_to_disk` made this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def holds_images(path: Path) -> bool:
    """Returns whether a Parquet file has images in it, rather than paths to images."""
    if not path.is_file():
        return False
    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException):
        return False
    return "path" not in schema.names and _column_of_files(schema) is not None


class TableImages(Images):
    """Images that are files within a table, which lies mapped on the disk and so is pickled by its place."""

    def __init__(self, rows: Any, column: str, paths: Sequence[str]) -> None:
        self.rows, self.column, self.paths = rows, column, paths

    def open(self, i: int) -> Image.Image:
        cell = self.rows[i][self.column]
        if cell is None:
            raise ValueError("the row holds no image")
        return open_image(Path(cell["path"]) if cell["bytes"] is None else io.BytesIO(cell["bytes"]))

    def fingerprint(self, i: int) -> bytes | None:
        return f"{self.rows._fingerprint} {i}".encode()


def _datasets() -> ModuleType:
    try:
        library = import_module("datasets")
    except ImportError:
        raise BadInput("hf: needs the extra: pip install 'cmsf[hf]'") from None
    library.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would tell the Hub of every opening, of local files too
    if not bars_enabled():
        library.disable_progress_bars()
    return library


def _split_name(spec: str) -> tuple[str, str | None]:
    """Returns the name or the path, and the configuration; an @ may be part of a path that exists."""
    path = expand_user(spec)
    name, at, config = spec.rpartition("@")
    if path.exists() or not at:
        return (str(path) if path.exists() else spec), None
    path = expand_user(name)
    return (str(path) if path.exists() else name), config


def _load(library: ModuleType, name: str, config: str | None) -> Any:
    path = Path(name)
    if (name.startswith(("/", ".", "~")) or name.endswith("/")) and not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if is_saved_dataset(path):
        return library.load_from_disk(name)
    if path.is_file():
        return library.load_dataset("parquet", data_files=name)
    return library.load_dataset(name, config)


def _choose_splits(spec: str, splits: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns train, val and test, and a note on others; a single split is trained on, whatever its name."""
    if not splits:
        raise BadInput(f"hf:{spec} holds no images")
    if len(splits) == 1:
        (split,) = splits
        note = () if split == "train" else (f"hf:{spec} has one split, {split}, which is trained on",)
        return {"train": splits[split]}, note
    chosen: dict[str, Any] = {}
    for alias, split in SPLIT_ALIASES.items():
        if alias in splits:
            chosen.setdefault(split, splits[alias])
    if "train" not in chosen:
        raise BadInput(f"hf:{spec} has the splits {', '.join(splits)}, and none called train")
    others = [f"{split} ({len(content)} rows)" for split, content in splits.items() if content not in chosen.values()]
    return chosen, ((f"splits left alone: {', '.join(others)}",) if others else ())


def _image_column(library: ModuleType, content: Any) -> str | None:
    images = [column for column, feature in content.features.items() if isinstance(feature, library.Image)]
    preferred = [column for column in images if column in _IMAGE_COLUMNS]
    return next(iter((*preferred, *images)), None) or _column_of_files(content.features.arrow_schema)


def _column_of_files(schema: pa.Schema) -> str | None:
    """Returns the column of images: bytes with a path, as `datasets` writes them, or plain bytes with a usual name."""
    files = [
        field.name
        for field in schema
        if pa.types.is_struct(field.type) and {inner.name for inner in field.type} == {"bytes", "path"}
    ]
    named = [
        field.name
        for field in schema
        if field.name in _IMAGE_COLUMNS
        and (field.name in files or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type))
    ]
    return next(iter((*named, *files)), None)


def _label_column(library: ModuleType, content: Any) -> str | None:
    features = content.features
    classes = [column for column, feature in features.items() if isinstance(feature, library.ClassLabel)]
    plain = [
        column
        for column in _LABEL_COLUMNS
        if isinstance(features.get(column), library.Value)
        and features[column].dtype.removeprefix("u").removeprefix("large_").startswith(("int", "string"))
    ]
    preferred = [column for column in _LABEL_COLUMNS if column in classes]
    return next(iter((*preferred, *classes, *plain)), None)


def _names(content: Any, column: str) -> tuple[list[str | None], tuple[str, ...]]:
    """Returns each row's class, and all classes in the order of their numbers where they have one."""
    values = content.select_columns([column])[:][column]
    known = disambiguate(getattr(content.features[column], "names", None) or ())
    names = [None if value in (None, -1, "", "-1") else known[value] if known else str(value) for value in values]
    return names, known


def _paths(rows: Any, column: str, split: str, root: Path) -> list[str]:
    """Returns each file's own name, if all have one that lasts; else the number of its row."""
    cells = rows.with_format("arrow")[:].column(column)
    own = pc.struct_field(cells, "path").to_pylist()
    numbered = [f"{split}/{i}" for i in range(len(own))]
    if None in own or len(set(own)) < len(own):
        return numbered
    if not any(map(os.path.isabs, own)):
        return [f"{split}/{path}" for path in own]
    below = [os.path.relpath(path, root.resolve()) for path in own]
    outside = any(path.startswith("..") for path in below)  # a cache's folders, which are called by a hash
    return numbered if outside else [Path(path).as_posix() for path in below]
