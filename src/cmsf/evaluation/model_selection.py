"""What to train on the labelled images: the linear layer, the head or the whole network, by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from cmsf.data import Split
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.finetune import (
    FINE_TUNE_MODES,
    FineTuneMode,
    FineTuneSettings,
    make_classifier,
    make_head,
    train_classifier,
    train_heads,
)
from cmsf.evaluation.folds import stratified_folds
from cmsf.evaluation.logistic import fit_logistic
from cmsf.evaluation.metrics import in_top_k
from cmsf.evaluation.predict import predict_scores
from cmsf.utils.progress import progress_prefix

TuneOption = FineTuneMode | Literal["auto"]
TUNE_OPTIONS: tuple[TuneOption, ...] = ("auto", *FINE_TUNE_MODES)
ENOUGH_TO_COMPARE, ENOUGH_FOR_WHOLE = 2, 10
"""Labels a class, on average: from so many on ways are compared, and the whole network is among them."""


@dataclass(frozen=True)
class Selection:
    """What was chosen, why, and which held-out images each way classified correctly, fold after fold."""

    mode: FineTuneMode
    reason: str
    correct: Mapping[FineTuneMode, Bool[Tensor, " m"]]

    def report(self) -> dict[str, Any]:
        """Returns what is written to classifier.json."""
        figures = {mode: {"accuracy": _percent(right), "images": len(right)} for mode, right in self.correct.items()}
        return {"reason": self.reason, "held out": figures}


def select_mode(
    extractor: FeatureExtractor,
    split: Split,
    width: int,
    classes: int,
    seed: int,
    settings: FineTuneSettings = FineTuneSettings(),
) -> Selection:
    """Compares what may be trained in stratified folds of the labelled images; equals go to the cheaper."""
    split = split.subset(split.labelled)
    count = len(split)
    if count < ENOUGH_TO_COMPARE * classes:
        return Selection("linear", f"linear: {count} labels of {classes} classes are too few to compare on", {})
    held_out = [rows.nonzero()[:, 0] for rows in stratified_folds(split.label)]
    folds = _CrossValidation(extractor, split, width, classes, seed, settings, held_out)
    correct: dict[FineTuneMode, Bool[Tensor, " m"]] = {}
    with progress_prefix("cross-validation"):
        correct["linear"] = fit_logistic(extractor(split), split.label.to(extractor.device), classes).correct
        correct["head"] = folds.heads()
        best = max(correct, key=lambda mode: int(correct[mode].sum()))
        if count >= ENOUGH_FOR_WHOLE * classes:
            correct["whole"] = folds.whole(correct[best])
            if correct["whole"].sum() > correct[best][: len(correct["whole"])].sum():
                best = "whole"
    return Selection(best, _describe(best, correct, len(held_out), count), correct)


@dataclass(frozen=True)
class _CrossValidation:
    """The folds of labelled images, and what to train on them."""

    extractor: FeatureExtractor
    split: Split
    width: int
    classes: int
    seed: int
    settings: FineTuneSettings
    held_out: Sequence[Tensor]
    """Indices, fold by fold."""

    def heads(self) -> Bool[Tensor, " m"]:
        """Trains a head for each fold, side by side; returns whether they classify their held-out images correctly."""
        backbone, device = self.extractor.backbone, self.extractor.device
        heads = [make_head(self.width, self.classes, self.seed, "head").to(device) for _ in self.held_out]
        taught = [self._taught(rows) for rows in self.held_out]
        split, label = self.split, self.split.label
        train_heads(backbone, heads, split, label, self.extractor, self.seed, self.settings, taught=taught)
        pairs = zip(heads, self.held_out, strict=True)
        return torch.cat([self._correct(nn.Sequential(backbone, head), rows) for head, rows in pairs])

    def whole(self, rival: Bool[Tensor, " m"]) -> Bool[Tensor, " k"]:
        """Trains a network a fold, until it is two standard errors above or below its rival on the same images."""
        correct = torch.empty(0, dtype=torch.bool)
        for number, rows in enumerate(self.held_out, 1):
            network = make_classifier(self.extractor, self.width, self.classes, self.seed)
            split = self.split.subset(self._taught(rows).nonzero()[:, 0])
            with progress_prefix(f"fold {number} of {len(self.held_out)}"):
                train_classifier(network, split, split.label, self.extractor, self.seed, self.settings)
                correct = torch.cat([correct, self._correct(network, rows)])
            gain = correct.double() - rival[: len(correct)].double()
            if gain.mean().abs() > 2 * gain.std(correction=0) / math.sqrt(len(gain)):
                break
        return correct

    def _taught(self, rows: Int[Tensor, " h"]) -> Bool[Tensor, " n"]:
        return torch.ones(len(self.split), dtype=torch.bool).index_fill(0, rows, False)

    def _correct(self, network: nn.Module, rows: Int[Tensor, " h"]) -> Bool[Tensor, " h"]:
        split = self.split.subset(rows)
        return in_top_k(predict_scores(network, split, self.extractor), split.label, 1)


def _describe(best: FineTuneMode, correct: Mapping[FineTuneMode, Bool[Tensor, " m"]], folds: int, count: int) -> str:
    """Returns one line that begins with the best."""
    total = max(len(right) for right in correct.values())
    figures = {
        mode: f"{_percent(right):.1f} %" + (f" of the first {len(right)}" if len(right) < total else "")
        for mode, right in correct.items()
    }
    how = f"{folds}-fold cross-validation on {count} labels" if folds > 1 else f"a held-out tenth of {count} labels"
    others = [f"{mode} {figure}" for mode, figure in figures.items() if mode != best]
    if "whole" not in correct:
        others.append(f"whole is not tried below {ENOUGH_FOR_WHOLE} labels a class")
    return f"{best}: {figures[best]} in {how}, {', '.join(others)}"


def _percent(correct: Bool[Tensor, " m"]) -> float:
    return 100 * float(correct.double().mean())
