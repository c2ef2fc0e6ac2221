"""Transfer: a linear layer on frozen features of other data sets, its settings searched for on their val images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch

from cmsf.data import open_source
from cmsf.data.labels import Labels
from cmsf.data.prepare import inference_split
from cmsf.data.source import Source, SourceSplit
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.linear import STANDARDISED, StandardScaler
from cmsf.evaluation.metrics import Accuracy, MeanAccuracy, Result, in_top_k
from cmsf.evaluation.transfer.search import Problem, Search, Watch
from cmsf.evaluation.transfer.suite import MEAN, Division, TransferSet, class_names, divide, listed_parts, places
from cmsf.evaluation.transfer.trial import fit
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import Update, progress_bar, progress_prefix


@dataclass(frozen=True)
class Prepared:
    """A data set, opened and divided; no image has been decoded yet."""

    wanted: TransferSet
    parts: dict[str, SourceSplit]
    labels: Labels
    division: Division

    @property
    def notes(self) -> list[str]:
        return [*self.division.notes, *self.wanted.differences(self.division.counts, len(self.labels.names))]

    @property
    def study(self) -> str:
        """A name that stands for these images, labels and splits, on whatever machine they are."""
        about = sha256("\n".join(path for part in self.parts.values() for path in part.images.paths).encode())
        for numbers in (self.labels.number, self.division.train, self.division.val):
            about.update(numbers.numpy().tobytes())
        about.update(f"{self.labels.names} {self.wanted.per_class}".encode())
        return about.hexdigest()


def evaluate_transfer(
    features: FeatureExtractor,
    suite: Sequence[TransferSet],
    search: Search,
    seed: int,
    trials: int,
    say: Callable[[str], None],
) -> Result:
    """The test images of each data set of a suite, and the mean over the sets; `trials` are what is asked for."""
    prepared = [_opened(wanted, seed) for wanted in suite]  # mistakes show before any work
    for one in prepared:
        for note in one.notes:
            say(f"{one.wanted.name}: {note}")
    judged: dict[str, Accuracy | MeanAccuracy] = {}
    described = {}
    with progress_bar("transfer", len(prepared) * trials) as at:
        for number, one in enumerate(prepared):
            name = f"{one.wanted.name}, {number + 1} of {len(prepared)}"
            at(number * trials, name, found=True)
            with progress_prefix(name):
                watch = _watching(at, name, number * trials, trials)
                judged[one.wanted.name], described[one.wanted.name] = _transfer(features, one, search, watch)
    for name, about in described.items():
        finished = about["trials"]["complete"] + about["trials"]["pruned"]
        if finished > trials:
            say(f"{name}: {finished} trials were there already, more than the {trials} asked for; all count")
    each = [one for one in judged.values() if isinstance(one, Accuracy)]
    if len(each) > 1:
        judged[MEAN] = MeanAccuracy(each)
    protocol = {
        "classifier": "one linear layer from zero, cross-entropy, weight decay on the weights, LBFGS (max_iter 20, "
        "history 10)",
        "search": "iterations 1 to 1000, lr 1e-6 to 1, weight decay 1e-9 to 1, all log-uniform; "
        "chosen on val, fitted again on train and val, judged on test",
        "layer": STANDARDISED,
        "transform": features.transform,
        "augmentation": "none",
        "seed": seed,
        "data sets": described,
    }
    return Result(judged, protocol)


def _watching(at: Update, name: str, before: int, trials: int) -> Watch:
    """Brings a bar of all trials up to date; what the first look finds was there from another time."""
    looked = False

    def watch(finished: int, best: float | None) -> None:
        nonlocal looked
        at(before + min(finished, trials), name + ("" if best is None else f", best {best:.2f} %"), found=not looked)
        looked = True

    return watch


def _opened(wanted: TransferSet, seed: int) -> Prepared:
    try:
        return prepare(wanted, open_source(wanted.source), seed)
    except BadInput as error:
        raise BadInput(f"data set {wanted.name}: {error}") from None


def prepare(wanted: TransferSet, source: Source, seed: int) -> Prepared:
    parts = dict(source.ordered_splits())
    paths = [path for part in parts.values() for path in part.images.paths]
    labels = class_names(wanted, paths, [name for part in parts.values() for name in part.names], source.classes)
    provided, rule, notes = places({name: len(part) for name, part in parts.items()}), wanted.rule, list(source.notes)
    if wanted.lists is not None and "test" not in parts:
        listed = listed_parts(wanted, paths)
        if listed is None:
            rule = wanted.unlisted
            notes.append(f"{' and '.join(wanted.lists)} are not there: the splits were drawn")
        else:
            provided, labels = listed, labels.keep(listed["train"] | listed["test"])
    division = divide(wanted.name, provided, labels, rule, seed)
    return Prepared(wanted, parts, labels, division.with_notes(notes))


def _transfer(
    features: FeatureExtractor, prepared: Prepared, search: Search, watch: Watch
) -> tuple[Accuracy, dict[str, Any]]:
    wanted, labels, division = prepared.wanted, prepared.labels, prepared.division
    pool = torch.cat([features(inference_split(part)).cpu() for part in prepared.parts.values()])
    scale = StandardScaler.fit(pool[division.train])
    problem = Problem(
        scale(pool[division.train]),
        labels.number[division.train],
        scale(pool[division.val]),
        labels.number[division.val],
        len(labels.names),
        wanted.per_class,
    )
    network = f"{features.network} {features.transform}"
    study = f"{wanted.name}-{sha256((prepared.study + network).encode()).hexdigest()[:16]}"
    found = search(problem, study, watch)
    learned = torch.cat([division.train, division.val])
    scale = StandardScaler.fit(pool[learned])
    layer = fit(scale(pool[learned]), labels.number[learned], len(labels.names), found.best)
    truth = labels.number[division.test]
    judged = Accuracy(in_top_k(layer(scale(pool[division.test])), truth, 1), truth, wanted.per_class)
    train, val, test = division.counts
    diverged = ["the last fit diverged, and was judged by its last finite weights"] if layer.diverged else []
    return judged, {
        "data": wanted.source,
        "images": {"train": train, "val": val, "test": test},
        "classes": len(labels.names),
        "splits": asdict(wanted.rule),
        "settings": asdict(found.best),
        "validation": found.value,
        "trials": found.trials,
        "notes": prepared.notes + diverged,
    }
