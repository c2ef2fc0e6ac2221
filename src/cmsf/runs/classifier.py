"""A classifier on the disk: a run that also says what is on an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.data import open_source
from cmsf.data.loader import worker_count
from cmsf.data.prepare import inference_split
from cmsf.data.sources.table import is_parquet, write_csv, write_parquet
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.predict import PLACES, Prediction, predict
from cmsf.runs.classifier_folder import ClassifierFolder
from cmsf.runs.run import Run
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user, report_write_errors
from cmsf.utils.screen import Screen


class Classifier(Run):
    """What cmsf finetune wrote, or a run with a classifier trained along; what works with a run works with it too."""

    folder: ClassifierFolder

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.folder = ClassifierFolder(self.folder.path)
        self.about: dict[str, Any] = self.folder.about()
        """Classes, and how they were learned, round by round."""

    @property
    def classes(self) -> tuple[str, ...]:
        """What the places of its scores are called."""
        return tuple(self.about["classes"])

    def network(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Backbone and head in eval mode: images in, a score a class out."""
        return self.folder.load_network(device)

    def predict(
        self,
        data: str | Path | None,
        out: str | Path | None = None,
        device: str = "auto",
        workers: int | None = None,
    ) -> list[Prediction]:
        """What is on each image of a source, in the order train, val, test; written to `out`, a .csv or .parquet.

        An image that cannot be read has its error instead.
        """
        file = None if out is None else _checked(expand_user(out))
        where = pick_device(device)
        network = self.network(where)
        like = FeatureExtractor(network[0], self.recipe.size, where, worker_count(workers))
        found = []
        source = open_source(data)
        for note in source.notes:
            Screen().print(note)
        size = self.recipe.size if self.recipe.cache == "ram" else None
        for _, split in source.ordered_splits():
            found += predict(network, inference_split(split, size), like, self.classes)
        if file is not None:
            _write(file, found, min(PLACES, len(self.classes)))
        return found


def _checked(out: Path) -> Path:
    """Refuse a file that cannot be written, before anything is computed for it."""
    if out.is_dir():
        raise BadInput(f"--out {out} is a folder; give a file, as {out / 'predictions.csv'}")
    if not (is_parquet(out) or out.suffix.lower() == ".csv"):
        raise BadInput(f"--out {out} will not do; predictions are written as .csv or .parquet")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {out.parent} to put {out.name} into; make it, or give another --out")
    return out


def _write(out: Path, found: Sequence[Prediction], places: int) -> None:
    """A row an image; as a list of labels for the same images it is as good as any."""
    numbers = ["", *(f"_{place}" for place in range(2, places + 1))]
    header = ["path", *(f"{name}{number}" for number in numbers for name in ("label", "confidence")), "error"]
    with report_write_errors(out, "give another --out"):
        if is_parquet(out):
            columns: dict[str, list[Any]] = {name: [] for name in header}
            for one in found:
                for name, value in zip(header, _fields(one, places), strict=True):
                    columns[name].append(value)
            write_parquet(out, columns, [name for name in header if name.startswith("confidence")])
        else:
            rows = ([_text(value) for value in _fields(one, places)] for one in found)
            write_csv(out, header, rows)


def _fields(one: Prediction, places: int) -> list[str | float | None]:
    said: list[str | float | None] = [field for pair in zip(one.labels, one.confidences, strict=True) for field in pair]
    return [one.path, *(said or [None] * (2 * places)), one.error]


def _text(value: str | float | None) -> str | None:
    return f"{value:.6f}" if isinstance(value, float) else value
