"""data.parquet: path, index, label, truth and split of each image of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cmsf.data import Dataset
from cmsf.data.labels import Labels
from cmsf.data.prepare import SeenImages
from cmsf.data.sources.table import read_parquet
from cmsf.utils.errors import BadInput
from cmsf.utils.files import atomic_write, file_version
from cmsf.utils.progress import track

_COLUMNS = ("path", "index", "label", "truth", "split")
_SCHEMA = pa.schema([(name, pa.int64() if name == "index" else pa.string()) for name in _COLUMNS])
_NULLABLE = ("label", "truth")
_UNORDERED = ("path", "label", "truth", "split")


@dataclass(frozen=True)
class Listing:
    table: pa.Table

    @classmethod
    def from_dataset(cls, data: Dataset) -> Listing:
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        splits = data.splits()
        for name, split in track(splits, "listing images", len(splits)):
            columns["path"] += split.paths
            columns["index"] += range(len(split))
            columns["label"] += Labels(split.label, data.label_names).to_names()
            columns["truth"] += Labels(split.truth, data.classes).to_names()
            columns["split"] += [name] * len(split)
        return cls(pa.table(columns, schema=_SCHEMA))

    @classmethod
    def read(cls, file: Path) -> Listing:
        """Reads the file once for each of its versions: several checks in a row ask for it."""
        return _read(file.absolute(), *file_version(file))

    def write(self, file: Path) -> None:
        with atomic_write(file) as temporary:
            pq.write_table(self.table, temporary)

    def rows(self) -> list[dict[str, Any]]:
        return list(self.table.to_pylist())

    def column(self, name: str, split: str | None = None) -> list[Any]:
        table = self.table if split is None else self.table.filter(pc.equal(self.table["split"], split))
        return list(table[name].to_pylist())

    def seen(self) -> SeenImages:
        """Returns which images the run was tested on, and which it was taught the label of."""
        taught = zip(self.column("path", "train"), self.column("label", "train"), strict=True)
        return SeenImages(set(self.column("path", "test")), {path for path, label in taught if label is not None})

    def votes_beyond_labels(self) -> int:
        """Returns how many training images k-NN votes with by their true class, where training had other labels; 0
        where it had the same."""
        train = self.table.filter(pc.equal(self.table["split"], "train"))
        label, truth = train["label"], train["truth"]
        return 0 if label.equals(truth) else len(truth) - truth.null_count

    def check_same_paths(self, data: Dataset, run: Path, otherwise: str) -> None:
        """Refuses other images than the run's, whatever their labels: what it was trained on would be tested on."""
        before = set(self.column("path"))
        now = {path for split in (data.train, data.test) if split is not None for path in split.paths}
        if before != now:
            raise BadInput(
                f"the images of {run} have changed since ({len(before)} then, {len(now)} now, the first that "
                f"differs is {min(before ^ now)}); restore them, or {otherwise}"
            )

    def check_same(self, data: Dataset, run: Path) -> None:
        """Refuses other images or labels than the run's, also in another order: cache and test split go by index."""
        current = Listing.from_dataset(data)
        if self.table.equals(current.table):
            return
        old, new = (set(zip(*map(listing.column, _UNORDERED), strict=True)) for listing in (self, current))
        first = min((path for path, *_ in old ^ new), default=current.column("path")[0])
        kind = "labels" if self.column("path") == current.column("path") else "images"
        raise BadInput(
            f"the {kind} of {run} have changed since ({len(self.table)} then, {len(current.table)} now, the first that "
            f"differs is {first}); restore them, or start another run"
        )


@lru_cache(maxsize=2)
def _read(file: Path, *_version: int) -> Listing:
    """Reads a table of the right columns and types, or raises BadInput; anybody may have written it."""
    table = read_parquet(file)
    invalid = BadInput(f"{file} is not what cmsf train wrote")
    if not set(_COLUMNS) <= set(table.column_names):
        raise invalid
    columns = []
    for field in _SCHEMA:
        column = table[field.name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind != field.type or (column.null_count and field.name not in _NULLABLE):
            raise invalid
        columns.append(column.cast(field.type))
    return Listing(pa.table(columns, schema=_SCHEMA))
