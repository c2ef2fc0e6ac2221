"""Tables of images: CSV or Parquet with `path` and `label`, as a source of images or as labels for one."""

from __future__ import annotations

import csv
import os
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.parquet as pq

from cmsf.data.images import Files
from cmsf.data.source import SPLITS, Part, Source, ordered
from cmsf.errors import BadInput
from cmsf.files import atomically

LIST_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Table:
    """Rows of a list: which image, which label."""

    file: Path
    column: str
    """`path`, or `index` where the images have no paths that their owner knows."""
    keys: list[str]
    labels: list[str | None]
    splits: list[str]
    has_labels: bool


def read_table(file: Path) -> Table:
    columns = read_columns(file)
    column = "path" if "path" in columns else "index"
    if column not in columns:
        raise BadInput(f"{file} has the columns {', '.join(columns) or 'none'}; it needs path (or index) and label")
    keys = [_text(value) for value in columns[column]]
    labels = [_label(value) for value in columns.get("label", [None] * len(keys))]
    splits = [_text(value).lower() for value in columns.get("split", [""] * len(keys))]
    unknown = sorted(set(splits) - {"", *SPLITS})
    if unknown:
        raise BadInput(f"{file} has images in a split called {unknown[0]!r}; use train, val and test")
    places: dict[str, int] = {}
    for number, key in enumerate(keys):
        if not key:
            raise BadInput(f"row {number + 1} of {file} has no {column}")
        first = places.setdefault(_same_script(key), number)
        if first != number:
            raise BadInput(f"{file} lists {key} twice, in rows {first + 1} and {number + 1}; keep one of them")
    return Table(file, column, keys, labels, [SPLITS[split or "train"] for split in splits], "label" in columns)


def open_list(file: Path) -> Source:
    """Images by their paths relative to the list; a blank label is none, and a column `split` may name the splits."""
    table = read_table(file)
    if not table.keys:
        raise BadInput(f"{file} lists no images")
    if table.column != "path":
        raise BadInput(f"{file} has no column path, and without paths it is no list of images")
    parts = {}
    for split in sorted(set(table.splits)):
        rows = [number for number, name in enumerate(table.splits) if name == split]
        images = Files(file.parent, [table.keys[row] for row in rows])
        parts[split] = Part(images, [table.labels[row] for row in rows])
    if "train" not in parts:
        raise BadInput(f"{file} has no images in the split train")
    notes = () if table.has_labels else (f"{file.name} has no column called label, so the images are unlabelled",)
    return Source(file.stem, parts, ordered(table.labels), notes)


def match_labels(file: Path, parts: Mapping[str, Sequence[str]], root: Path | None) -> dict[str, list[str | None]]:
    """The listed label of every image of a source, None for a blank or where it is not listed.

    parts: the paths of the source's images by part; `root`, where there is one, is the folder they are relative to. A
    list names them by the same paths, or by paths relative to the list, or by index among the training images.
    """
    table = read_table(file)
    if not table.has_labels:
        raise BadInput(f"{file} has no column label; a list of labels has path (or index) and label")
    if not table.keys:
        raise BadInput(f"{file} lists no images")
    if table.column == "index":
        return {"train": _by_index(table, len(parts["train"]))}
    keys, known = table.keys, parts
    wrong = _strangers(keys, known)
    if wrong and root is not None:
        keys = [_below(root, file.parent.resolve() / key) for key in table.keys]
        known = {part: [_below(root, root.resolve() / path) for path in paths] for part, paths in parts.items()}
        wrong = min(wrong, _strangers(keys, known), key=len)
    if wrong:
        raise BadInput(
            f"{len(wrong)} of {len(keys)} rows of {file} are for images that are not there (the first is {wrong[0]}); "
            f"paths look like {parts['train'][0]}"
        )
    label = dict(zip(map(_same_script, keys), table.labels, strict=True))
    return {part: [label.get(_same_script(path)) for path in paths] for part, paths in known.items()}


def _by_index(table: Table, count: int) -> list[str | None]:
    wrong = [key for key in table.keys if not key.isdecimal() or int(key) >= count]
    if wrong:
        raise BadInput(
            f"{len(wrong)} of {len(table.keys)} rows of {table.file} are for images that are not there (the first is "
            f"{wrong[0]}); index is a whole number below {count}"
        )
    label = {int(key): name for key, name in zip(table.keys, table.labels, strict=True)}
    return [label.get(number) for number in range(count)]


def _strangers(keys: Sequence[str], parts: Mapping[str, Sequence[str]]) -> list[str]:
    known = {_same_script(path) for paths in parts.values() for path in paths}
    return [key for key in keys if _same_script(key) not in known]


def _below(root: Path, path: Path) -> str:
    """A path relative to the root; links on the way there are left as they are."""
    return Path(os.path.relpath(path, root.resolve())).as_posix()


def read_mapping(file: Path) -> dict[str, str]:
    """A CSV or Parquet of two columns, class and group."""
    columns = read_columns(file)
    if len(columns) != 2:
        raise BadInput(f"{file} has the columns {', '.join(columns) or 'none'}; a mapping has two, class and group")
    classes, groups = ([_label(value) for value in column] for column in columns.values())
    mapping: dict[str, str] = {}
    for number, (name, group) in enumerate(zip(classes, groups, strict=True), start=1):
        if name is None or group is None:
            raise BadInput(f"row {number} of {file} is not whole; a mapping has a class and a group in each")
        if mapping.setdefault(name, group) != group:
            raise BadInput(f"{file} puts {name!r} into both {mapping[name]!r} and {group!r}; keep one of them")
    return mapping


def write_rows(file: Path, header: Sequence[str], rows: Iterable[Sequence[str | None]]) -> None:
    """A CSV; None is blank."""
    with atomically(file) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_columns(file: Path, columns: Mapping[str, Sequence[Any]], numbers: Collection[str] = ()) -> None:
    """A Parquet file; columns are text but for those of numbers."""
    kinds = {name: pa.float64() if name in numbers else pa.string() for name in columns}
    with atomically(file) as temporary:
        pq.write_table(pa.table(dict(columns), schema=pa.schema(list(kinds.items()))), temporary)


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() in (".parquet", ".pq")


def read_columns(file: Path) -> dict[str, list[Any]]:
    """A CSV or Parquet file by column."""
    try:
        return _parquet(file) if is_parquet(file) else _csv(file)
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None


def _csv(file: Path) -> dict[str, list[Any]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {file}: {error}; a list is text in UTF-8") from None
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)  # spreadsheets of half the world write semicolons
    try:
        rows = [row for row in csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    except csv.Error as error:
        raise BadInput(f"cannot read {file}: {error}") from None
    if not rows:
        raise BadInput(f"{file} is empty; it needs a first line path,label")
    names = [name.strip().lower() for name in rows[0]]
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            raise BadInput(f"row {number} of {file} has {len(row)} fields and the first line {len(names)}")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(names)}


def _parquet(file: Path) -> dict[str, list[Any]]:
    try:
        table = pq.read_table(file)
    except pa.ArrowException as error:
        raise BadInput(f"cannot read {file}: {str(error).splitlines()[0]}") from None
    return dict(table.to_pydict())


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _label(value: Any) -> str | None:
    """-1 is unlabelled everywhere; a spreadsheet's 3.0 is class 3."""
    if isinstance(value, float):
        value = None if value != value else int(value) if value.is_integer() else value
    text = _text(value)
    return None if text in ("", "-1") else text


def _same_script(path: str) -> str:
    """One spelling for a path: composed letters, slashes, no detours."""
    return posixpath.normpath(normalize("NFC", path.replace("\\", "/")))
