"""Files of embeddings, .npz and .parquet, written block by block: at no time are all features in memory."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from torch import Tensor

from cmsf.data.sources.table import is_parquet
from cmsf.utils.files import atomic_write

_METADATA_KEY = "cmsf"
"""Where a Parquet file says how its embeddings were made, in JSON."""
_BLOCK = 1024
"""Texts that are made an array at once."""


@dataclass(frozen=True)
class Names:
    """What the rows are called."""

    paths: list[str]
    labels: list[str | None]
    splits: list[str]


def write_embeddings(
    file: Path, features: Iterable[Float[Tensor, "b f"]], width: int, names: Names, about: Mapping[str, Any]
) -> None:
    """Writes a row for each name; about: how the features were made. The same input is the same bytes."""
    write = _write_parquet if is_parquet(file) else _write_npz
    with atomic_write(file) as temporary:
        write(temporary, features, width, names, json.dumps(about))


def _write_parquet(file: Path, features: Iterable[Float[Tensor, "b f"]], width: int, names: Names, about: str) -> None:
    """Writes a group of rows for each block."""
    text = pa.string()
    fields = {"path": text, "label": text, "split": text, "embedding": pa.list_(pa.float32(), width)}
    schema = pa.schema(list(fields.items()), metadata={_METADATA_KEY: about})
    columns = zip(names.paths, names.labels, names.splits, strict=True)
    with pq.ParquetWriter(file, schema, use_dictionary=["label", "split"]) as writer:
        for block in features:
            texts = [pa.array(column, text) for column in zip(*islice(columns, len(block)), strict=True)]
            embedding = pa.FixedSizeListArray.from_arrays(pa.array(block.numpy().reshape(-1)), width)
            writer.write_table(pa.table([*texts, embedding], schema=schema))


def _write_npz(file: Path, features: Iterable[Float[Tensor, "b f"]], width: int, names: Names, about: str) -> None:
    """Writes what `numpy.load` opens without unpickling; texts are compressed, for they are as wide as the longest."""
    with zipfile.ZipFile(file, "w") as archive:
        blocks = (block.numpy() for block in features)
        _write_array(archive, "features", (len(names.paths), width), np.dtype(np.float32), blocks)
        texts = {"paths": names.paths, "labels": [label or "" for label in names.labels], "splits": names.splits}
        for name, column in texts.items():
            dtype = np.dtype(f"U{max(1, *map(len, column))}")
            _write_array(archive, name, (len(column),), dtype, _text_blocks(column, dtype), zipfile.ZIP_DEFLATED)
        metadata = np.array(about)
        _write_array(archive, "metadata", (), metadata.dtype, [metadata])


def _text_blocks(column: Sequence[str], dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(column), _BLOCK):
        yield np.array(column[start : start + _BLOCK], dtype)


def _write_array(
    archive: zipfile.ZipFile,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    blocks: Iterable[npt.NDArray[Any]],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    entry = zipfile.ZipInfo(f"{name}.npy")  # which has always the same date
    entry.compress_type = compression
    with archive.open(entry, "w", force_zip64=True) as stream:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
            stream.write(np.ascontiguousarray(block, dtype).tobytes())
