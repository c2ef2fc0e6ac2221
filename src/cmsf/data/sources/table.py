"""Tables of images: CSV or Parquet with `path` and `label`, as a source of images or as labels for one."""

from __future__ import annotations

import csv
import os
import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cmsf.data.images import FileImages
from cmsf.data.source import SPLIT_ALIASES, Source, SourceSplit, sort_classes
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, check_regular_file
from cmsf.utils.memory import available_memory
from cmsf.utils.progress import progress_bar
from cmsf.utils.text import first_line, short_repr

_DIGITS = 19
"""A number with so many is above any count."""
_TABLE_BY_BYTE, _CELL = 16, 160
"""Bytes of memory for each byte of a CSV, and for each cell of a table, at most."""
_MAX_TEXT = 1 << 16
TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Table:
    """The rows of a list: an image and its label each."""

    file: Path
    column: str
    """What `keys` are: `path`, or `index` where the images have no paths that their owner knows."""
    keys: list[str]
    labels: list[str | None]
    splits: list[str]
    has_labels: bool


def read_table(file: Path) -> Table:
    with progress_bar(f"reading {file.name}", None):
        return _check_table(file, read_columns(file))


def _check_table(file: Path, columns: Mapping[str, list[Any]]) -> Table:
    column = "path" if "path" in columns else "index"
    if column not in columns:
        raise BadInput(f"{file} has the columns {_join_names(columns)}; it needs path (or index) and label")
    keys = [_text(value) for value in columns[column]]
    labels = [_label(value) for value in columns.get("label", [None] * len(keys))]
    splits = [_text(value).lower() for value in columns.get("split", [""] * len(keys))]
    unknown = sorted(set(splits) - {"", *SPLIT_ALIASES})
    if unknown:
        raise BadInput(f"{file} has images in a split called {short_repr(unknown[0])!r}; use train, val and test")
    places: dict[str, int] = {}
    for number, key in enumerate(keys):
        if not key:
            raise BadInput(f"row {number + 1} of {file} has no {column}")
        first = places.setdefault(_normalize_path(key), number)
        if first != number:
            raise BadInput(
                f"{file} lists {short_repr(key)} twice, in rows {first + 1} and {number + 1}; keep one of them"
            )
    return Table(file, column, keys, labels, [SPLIT_ALIASES[split or "train"] for split in splits], "label" in columns)


def open_table(file: Path) -> Source:
    """Opens images by their paths relative to the list; a blank label is none, a column `split` may name the splits."""
    table = read_table(file)
    if not table.keys:
        raise BadInput(f"{file} lists no images")
    if table.column != "path":
        raise BadInput(f"{file} has no column path, and without paths it is not a list of images")
    splits = {}
    for split in sorted(set(table.splits)):
        rows = [row for row, name in enumerate(table.splits) if name == split]
        images = FileImages(file.parent, [table.keys[row] for row in rows])
        splits[split] = SourceSplit(images, [table.labels[row] for row in rows])
    if "train" not in splits:
        raise BadInput(f"{file} has no images in the split train")
    notes = () if table.has_labels else (f"{file.name} has no column called label, so the images are unlabelled",)
    return Source(file.stem, splits, sort_classes(table.labels), notes)


def read_label_list(source: Source, file: Path) -> dict[str, list[str | None]]:
    """Returns the listed label of every image, by split; None for a blank or where it is not listed."""
    listed = read_label_rows(source, file)
    return {split: [labels.get(i) for i in range(len(source.splits[split]))] for split, labels in listed.items()}


def read_label_rows(source: Source, file: Path) -> dict[str, dict[int, str | None]]:
    """Returns the label of each image that is listed, by split and index; None for a blank.

    A list names images by the source's paths, or by paths relative to the list, or by index among the training images.
    """
    images = source.train.images
    root = images.root if isinstance(images, FileImages) else None
    paths: Mapping[str, Sequence[str]] = {name: split.images.paths for name, split in source.splits.items()}
    table = read_table(file)
    if not table.has_labels:
        raise BadInput(f"{file} has no column label; a list of labels has path (or index) and label")
    if not table.keys:
        raise BadInput(f"{file} lists no images")
    if table.column == "index":
        return {"train": _match_by_index(table, len(paths["train"]))}
    keys, known = table.keys, paths
    unknown = _unknown_paths(keys, known)
    if unknown and root is not None:
        keys = [_below(root, file.parent.resolve() / key) for key in table.keys]
        known = {split: [_below(root, root.resolve() / path) for path in inside] for split, inside in paths.items()}
        unknown = min(unknown, _unknown_paths(keys, known), key=len)
    _refuse_unknown(table, unknown, f"paths look like {short_repr(paths['train'][0])}")
    label = dict(zip(map(_normalize_path, keys), table.labels, strict=True))
    normalized = {split: [_normalize_path(path) for path in inside] for split, inside in known.items()}
    return {split: {i: label[key] for i, key in enumerate(keys) if key in label} for split, keys in normalized.items()}


def _match_by_index(table: Table, count: int) -> dict[int, str | None]:
    unknown = [key for key in table.keys if not (key.isdecimal() and len(key) < _DIGITS) or int(key) >= count]
    _refuse_unknown(table, unknown, f"index is a whole number below {count}")
    return {int(key): name for key, name in zip(table.keys, table.labels, strict=True)}


def _refuse_unknown(table: Table, unknown: Sequence[str], hint: str) -> None:
    if unknown:
        raise BadInput(
            f"{len(unknown)} of {len(table.keys)} rows of {table.file} are for images that are not there (the first is "
            f"{short_repr(unknown[0])}); {hint}"
        )


def _unknown_paths(keys: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[str]:
    known = {_normalize_path(path) for inside in paths.values() for path in inside}
    return [key for key in keys if _normalize_path(key) not in known]


def _below(root: Path, path: Path) -> str:
    """Returns a path relative to the root, with links on the way there as they are."""
    return Path(os.path.relpath(path, root.resolve())).as_posix()


def _join_names(columns: Iterable[str]) -> str:
    return short_repr(", ".join(columns)) or "none"


def read_mapping(file: Path) -> dict[str, str]:
    """Reads a CSV or Parquet file of two columns, class and group."""
    columns = read_columns(file)
    if len(columns) != 2:
        raise BadInput(f"{file} has the columns {_join_names(columns)}; a mapping has two, class and group")
    classes, groups = ([_label(value) for value in column] for column in columns.values())
    mapping: dict[str, str] = {}
    for number, (name, group) in enumerate(zip(classes, groups, strict=True), start=1):
        if name is None or group is None:
            raise BadInput(f"row {number} of {file} is not whole; a mapping has a class and a group in each")
        if mapping.setdefault(name, group) != group:
            raise BadInput(
                f"{file} puts {short_repr(name)!r} into both {short_repr(mapping[name])!r} and "
                f"{short_repr(group)!r}; keep one of them"
            )
    return mapping


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[str | None]]) -> None:
    """Writes a CSV file; None is blank."""
    with atomic_write(file) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        plain = csv.writer(stream, lineterminator="\n")
        quoted = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for row in (header, *rows):
            # A lone carriage return ends a line for whoever reads, and is not quoted of itself.
            (quoted if any("\r" in field for field in row if field) else plain).writerow(row)


def write_parquet(file: Path, columns: Mapping[str, Sequence[Any]], numbers: Collection[str] = ()) -> None:
    """Writes a Parquet file; columns are text but for those of numbers."""
    kinds = {name: pa.float64() if name in numbers else pa.string() for name in columns}
    with atomic_write(file) as temporary:
        pq.write_table(pa.table(dict(columns), schema=pa.schema(list(kinds.items()))), temporary)


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() in (".parquet", ".pq")


def read_columns(file: Path) -> dict[str, list[Any]]:
    """Reads a CSV or Parquet file by column."""
    try:
        return dict(read_parquet(file).to_pydict()) if is_parquet(file) else _read_csv(file)
    except BadInput:
        raise
    except (pa.ArrowException, ArithmeticError, MemoryError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read {file}: {first_line(error)}") from None
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        raise BadInput(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None


def _read_csv(file: Path) -> dict[str, list[Any]]:
    limit = available_memory() // _TABLE_BY_BYTE
    with file.open("rb") as stream:  # may be a pipe, whose size nobody knows
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise BadInput(f"cannot read {file}: it has more than {limit:,} bytes, which memory has no room for; cut it up")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {file}: {error.reason} at byte {error.start}; a list is text in UTF-8") from None
    header = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=header.count)  # spreadsheets of half the world write semicolons
    try:
        rows = [row for row in csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    except csv.Error as error:
        raise BadInput(f"cannot read {file}: {error}") from None
    if not rows:
        raise BadInput(f"{file} is empty; it needs a first line path,label")
    names = [name.strip().lower() for name in rows[0]]
    _check_names(file, names)
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            raise BadInput(f"row {number} of {file} has {len(row)} fields and the first line {len(names)}")
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(names)}


def read_parquet(file: Path) -> pa.Table:
    """Reads a table that somebody else may have written, or raises BadInput; text columns are dictionary-encoded."""
    check_regular_file(file)
    try:
        with pq.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            _check_names(file, schema.names)
            rows, limit = opened.metadata.num_rows, available_memory() // _CELL // max(1, len(schema))
            if rows > limit:
                raise BadInput(
                    f"cannot read {file}: it has {rows:,} rows, and memory has room for {limit:,}; cut it up"
                )
        texts = [field.name for field in schema if _is_text(field.type)]
        # Text is left as Parquet packs it, each value once, until it is known that none is endless.
        table = pq.read_table(file, read_dictionary=texts)
        for name in texts:
            _check_text(file, name, table.column(name))
        table.validate(full=True)
        return table
    except BadInput:
        raise
    # Bytes that are not UTF-8, and whatever a damaged file makes of itself.
    except (pa.ArrowException, ValueError, ArithmeticError, MemoryError, KeyError, TypeError) as error:
        raise BadInput(f"cannot read {file}: {first_line(error)}") from None


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _check_text(file: Path, name: str, column: pa.ChunkedArray) -> None:
    for chunk in column.chunks:
        values = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
        longest = pc.max(pc.binary_length(values)).as_py() or 0
        if longest > _MAX_TEXT:
            raise BadInput(
                f"cannot read {file}: {short_repr(name)} has a text of {longest:,} bytes; {_MAX_TEXT:,} are the most"
            )


def _check_names(file: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BadInput(f"{file} has the column {short_repr(twice[0])!r} twice; keep one of them")


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _label(value: Any) -> str | None:
    """Returns the class of a cell: -1 is unlabelled everywhere, a spreadsheet's 3.0 is class 3."""
    if isinstance(value, float):
        value = None if value != value else int(value) if value.is_integer() else value
    text = _text(value)
    return None if text in ("", "-1") else text


def _normalize_path(path: str) -> str:
    """Returns one spelling of a path: composed letters, slashes, no detours."""
    return posixpath.normpath(normalize("NFC", path.replace("\\", "/")))
