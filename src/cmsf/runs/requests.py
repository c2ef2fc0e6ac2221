"""What can be asked of a run, checked without torch: whether it is one, its evaluations, the files of embeddings."""

from __future__ import annotations

import os
from pathlib import Path

from cmsf.utils.constants import RECIPE_FILE, WEIGHT_FILES
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user

EMBEDDING_SUFFIXES = (".npz", ".parquet", ".pq")
"""The files that embeddings are written to."""
TRANSFER, CLASSIFIER = "transfer", "classifier"
METRICS = ("knn", "linear", "linear-sgd", "few-labels", TRANSFER, "retrieval", CLASSIFIER)


def check_run(path: str | Path) -> None:
    """Refuses a path that is not a run folder."""
    path = expand_user(path)
    if not os.path.exists(path):  # False for a name too long for a path
        raise BadInput(f"no such run: {path}")
    if path.is_file():
        if path.suffix not in WEIGHT_FILES:
            raise BadInput(f"{path} is a file and not a run; give a folder that cmsf train wrote")
        raise BadInput(
            f"{path} is a file and not a run; weights without a run are named by --init {path}, with --data SOURCE"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise BadInput(f"{path} cannot be read; make it readable")
    if not os.path.exists(path / RECIPE_FILE):
        raise BadInput(f"{path} is not a run: it has no {RECIPE_FILE}; give a folder that cmsf train wrote")


def check_metric(metric: str, data: str | Path | None = None) -> None:
    if metric not in METRICS:
        hint = did_you_mean(metric, METRICS, f"use {', '.join(METRICS)}")
        raise BadInput(f"unknown evaluation {metric!r}; {hint}")
    if metric == TRANSFER and data is not None:
        raise BadInput(
            f"transfer takes its data sets from a suite, not from --data {data}; leave it out, or name it in a YAML "
            "file, a line as birds: photos/birds, and give that with --suite"
        )
