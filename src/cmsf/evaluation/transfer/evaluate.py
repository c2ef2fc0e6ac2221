"""Transfer: a linear layer on frozen features of other data sets, its settings searched for on their val images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cmsf.data import Source, Split, open_source
from cmsf.data.images import Arrays
from cmsf.data.labels import Labels
from cmsf.data.source import Part
from cmsf.evaluation.features import Extractor
from cmsf.evaluation.linear import STANDARDISED, Standardised
from cmsf.evaluation.measures import Judged, MeanOf, Result, hits
from cmsf.evaluation.transfer.lbfgs import fit
from cmsf.evaluation.transfer.search import Problem
from cmsf.evaluation.transfer.searching import Search
from cmsf.evaluation.transfer.splits import Division, divide, places
from cmsf.evaluation.transfer.suite import TransferSet, listed_parts


def evaluate_transfer(
    features: Extractor, suite: Sequence[TransferSet], search: Search, seed: int, say: Callable[[str], None]
) -> Result:
    """The test images of each data set of a suite, and the mean over the sets."""
    judged: dict[str, Judged | MeanOf] = {}
    described = {}
    for wanted in suite:
        judged[wanted.name], described[wanted.name] = _transfer(features, wanted, search, seed, say)
    each = [one for one in judged.values() if isinstance(one, Judged)]
    if len(each) > 1:
        judged["mean"] = MeanOf(each)
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


def _transfer(
    features: Extractor, wanted: TransferSet, search: Search, seed: int, say: Callable[[str], None]
) -> tuple[Judged, dict[str, Any]]:
    source = open_source(wanted.source)
    pool, labels, division = pooled(features, wanted, source, seed)
    notes = [*division.notes, *filter(None, [wanted.compare(division.counts)])]
    for note in notes:
        say(f"{wanted.name}: {note}")
    learned = torch.cat([division.train, division.val])
    scale = Standardised.by(pool[division.train])
    problem = Problem(
        scale(pool[division.train]),
        labels.number[division.train],
        scale(pool[division.val]),
        labels.number[division.val],
        len(labels.names),
        wanted.per_class,
    )
    found = search(problem, f"{wanted.name}-{_digest(problem)}")
    scale = Standardised.by(pool[learned])
    layer = fit(scale(pool[learned]), labels.number[learned], len(labels.names), found.best)
    truth = labels.number[division.test]
    judged = Judged(hits(layer(scale(pool[division.test])), truth, 1), truth, wanted.per_class)
    train, val, test = division.counts
    return judged, {
        "data": wanted.source,
        "images": {"train": train, "val": val, "test": test},
        "classes": len(labels.names),
        "splits": asdict(wanted.rule),
        "settings": asdict(found.best),
        "validation": found.value,
        "trials": found.trials,
        "notes": notes,
    }


def pooled(
    features: Extractor, wanted: TransferSet, source: Source, seed: int
) -> tuple[Float[Tensor, "n f"], Labels, Division]:
    """Features and labels of all images of a source, one part after the other, and how they are divided."""
    parts = dict(source.in_order())
    pool = torch.cat([features(_split(part)).cpu() for part in parts.values()])
    labels = Labels.of([name for part in parts.values() for name in part.names], source.classes)
    provided, rule, missing = places({name: len(part) for name, part in parts.items()}), wanted.rule, ""
    if wanted.lists is not None and "test" not in parts:
        listed = listed_parts(wanted, source)
        if listed is None:
            rule, missing = wanted.unlisted, f"{' and '.join(wanted.lists)} are not there: the splits were drawn"
        else:
            provided, labels = listed, labels.only(listed["train"] | listed["test"])
    division = divide(wanted.name, provided, labels, rule, seed)
    return pool, labels, replace(division, notes=(*filter(None, [missing]), *division.notes))


def _split(part: Part) -> Split:
    images = part.images
    unknown = torch.full((len(part),), -1)
    return Split(images.pictures if isinstance(images, Arrays) else images, images.paths, unknown, unknown)


def _digest(problem: Problem) -> str:
    found = sha256(f"{problem.classes} {problem.per_class}".encode())
    for tensor in (problem.train, problem.train_label, problem.val, problem.val_label):
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
