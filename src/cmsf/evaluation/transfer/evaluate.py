"""Evaluates a linear classifier on frozen features of other data sets, its settings tuned on their val images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch

from cmsf.data.prepare import inference_split
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.linear import STANDARDISED, StandardScaler
from cmsf.evaluation.metrics import Accuracy, MeanAccuracy, Result, in_top_k
from cmsf.evaluation.transfer.datasets import MEAN, PreparedSet, TransferSet, open_set
from cmsf.evaluation.transfer.trial import Problem, fit
from cmsf.evaluation.transfer.tune import OnProgress, Tuner
from cmsf.utils.progress import Update, progress_bar, progress_prefix, track


def evaluate_transfer(
    extractor: FeatureExtractor,
    suite: Sequence[TransferSet],
    tuner: Tuner,
    seed: int,
    trials: int,
    print_line: Callable[[str], None],
) -> Result:
    """Evaluates the test images of each data set of a suite, and the mean over the sets.

    trials: what is asked for, for each set; `tuner` may find more that were run before.
    """
    opened = track(suite, "data sets", len(suite))
    prepared = [open_set(dataset, seed) for dataset in opened]  # mistakes show before any work
    for prepared_set in prepared:
        for note in prepared_set.notes:
            print_line(f"{prepared_set.dataset.name}: {note}")
    accuracies: dict[str, Accuracy] = {}
    described: dict[str, dict[str, Any]] = {}
    with progress_bar("transfer", len(prepared) * trials) as update:
        for number, prepared_set in enumerate(prepared):
            name, title = prepared_set.dataset.name, f"{prepared_set.dataset.name}, {number + 1} of {len(prepared)}"
            update(number * trials, title, resumed=True)
            with progress_prefix(title):
                on_progress = _bar_updates(update, title, number * trials, trials)
                accuracies[name], described[name] = _evaluate_set(extractor, prepared_set, tuner, on_progress)
    for name, description in described.items():
        finished = description["trials"]["complete"] + description["trials"]["pruned"]
        if finished > trials:
            print_line(f"{name}: {finished} trials were there already, more than the {trials} asked for; all count")
    mean = {MEAN: MeanAccuracy(list(accuracies.values()))} if len(accuracies) > 1 else {}
    protocol = {
        "classifier": "one linear layer from zero, cross-entropy, weight decay on the weights, LBFGS (max_iter 20, "
        "history 10)",
        "search": "iterations 1 to 1000, lr 1e-6 to 1, weight decay 1e-9 to 1, all log-uniform; "
        "chosen on val, fitted again on train and val, judged on test",
        "layer": STANDARDISED,
        **extractor.protocol(*(inference_split(part) for each in prepared for part in each.parts.values())),
        "augmentation": "none",
        "seed": seed,
        "data sets": described,
    }
    return Result({**accuracies, **mean}, protocol)


def _bar_updates(update: Update, title: str, start: int, trials: int) -> OnProgress:
    """Returns a callback that moves the bar of all trials; what it is first called with was run before."""
    first = True

    def on_progress(finished: int, best: float | None) -> None:
        nonlocal first
        update(start + min(finished, trials), title + ("" if best is None else f", best {best:.2f} %"), resumed=first)
        first = False

    return on_progress


def _evaluate_set(
    extractor: FeatureExtractor, prepared: PreparedSet, tuner: Tuner, on_progress: OnProgress
) -> tuple[Accuracy, dict[str, Any]]:
    """Searches settings on train and val, fits with the best on both, and evaluates on test."""
    dataset, labels, splits = prepared.dataset, prepared.labels, prepared.splits
    features = torch.cat([extractor(inference_split(split)).cpu() for split in prepared.parts.values()])
    classes = len(labels.names)
    scale = StandardScaler.fit(features[splits.train])
    train, val = ((scale(features[rows]), labels.number[rows]) for rows in (splits.train, splits.val))
    problem = Problem(*train, *val, classes, dataset.per_class)
    fingerprint = f"{prepared.fingerprint()}{extractor.network} {extractor.preprocessing.key}"
    tuned = tuner(problem, f"{dataset.name}-{sha256(fingerprint.encode()).hexdigest()[:16]}", on_progress)
    fitted = torch.cat([splits.train, splits.val])
    scale = StandardScaler.fit(features[fitted])
    layer = fit(scale(features[fitted]), labels.number[fitted], classes, tuned.best)
    truth = labels.number[splits.test]
    accuracy = Accuracy(in_top_k(layer(scale(features[splits.test])), truth, 1), truth, dataset.per_class)
    diverged = ["the last fit diverged, and was judged by its last finite weights"] if layer.diverged else []
    return accuracy, {
        "data": dataset.source,
        "images": dict(zip(("train", "val", "test"), splits.counts, strict=True)),
        "classes": classes,
        "splits": asdict(dataset.rule),
        "settings": asdict(tuned.best),
        "validation": tuned.value,
        "trials": tuned.trials,
        "notes": prepared.notes + diverged,
    }
