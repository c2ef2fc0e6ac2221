"""Calibration and confusion: equal to what one would count by hand."""

import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from cmsf.analysis.figures.classifier import draw_confusion, draw_reliability
from cmsf.evaluation.metrics import calibration, confusion


def scored(images: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(classes, (images,), generator=generator)
    scores = 2 * torch.randn(images, classes, generator=generator)
    scores[torch.arange(images), truth] += 1.5
    return scores, truth


def by_hand(scores: Tensor, truth: Tensor, bins: int) -> tuple[float, float, list[int]]:
    """Guo et al. 2017, equation 3, an image and a bin at a time."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    likelihood = 0.0
    for row, right in zip(scores.double().tolist(), truth.tolist(), strict=True):
        total = sum(math.exp(value) for value in row)
        probabilities = [math.exp(value) / total for value in row]
        likelihood -= math.log(probabilities[right])
        sure = max(probabilities)
        for number in range(bins):
            if number / bins < sure <= (number + 1) / bins:
                members[number].append((sure, probabilities.index(sure) == right))
    error = 0.0
    for inside in filter(None, members):
        accuracy = sum(hit for _, hit in inside) / len(inside)
        confidence = sum(sure for sure, _ in inside) / len(inside)
        error += len(inside) / len(truth) * abs(accuracy - confidence)
    return 100 * error, likelihood / len(truth), [len(inside) for inside in members]


@pytest.mark.parametrize(("images", "classes", "bins"), [(500, 10, 15), (300, 2, 15), (1, 3, 15), (200, 5, 4)])
def test_it_equals_a_slow_transcription(images: int, classes: int, bins: int) -> None:
    scores, truth = scored(images, classes)
    found = calibration(scores, truth, bins)
    error, likelihood, counts = by_hand(scores, truth, bins)
    assert found.error == pytest.approx(error, abs=1e-9)
    assert found.negative_log_likelihood == pytest.approx(likelihood, abs=1e-9)
    assert [one.images for one in found.bins] == counts


def test_who_is_right_as_often_as_sure_has_no_error_and_who_is_sure_of_nonsense_all_of_it() -> None:
    half = torch.zeros(2, 2)  # sure by half, right by half: ties go to the first class
    assert calibration(half, torch.tensor([0, 1])).error == pytest.approx(0)
    certain = torch.tensor([[100.0, 0.0]] * 3)
    assert calibration(certain, torch.tensor([1, 1, 1])).error == pytest.approx(100)
    assert calibration(certain, torch.tensor([0, 0, 0])).bins[-1].images == 3  # a confidence of one is in the last bin


def test_confusion_has_a_row_a_true_class() -> None:
    counts = confusion(torch.tensor([0, 2, 2, 1]), torch.tensor([0, 1, 1, 2]), 3)
    assert counts.tolist() == [[1, 0, 0], [0, 0, 2], [0, 1, 0]]


@pytest.mark.parametrize("classes", [2, 40])
def test_pictures_are_drawn_for_few_classes_and_many(classes: int, tmp_path: Path) -> None:
    scores, truth = scored(50 * classes, classes)
    names = [f"$class$ {number} with a long name" for number in range(classes)]
    draw_confusion(confusion(scores.argmax(1), truth, classes), names, tmp_path / "confusion.png")
    draw_reliability(calibration(scores, truth), tmp_path / "calibration.png")
    for file in ("confusion.png", "calibration.png"):
        with Image.open(tmp_path / file) as picture:
            assert min(picture.size) > 300
            assert picture.convert("L").getextrema() != (255, 255)
