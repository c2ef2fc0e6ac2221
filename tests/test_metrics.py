"""Metrics against hand counts; their intervals against known values and slow transcriptions."""

from math import sqrt

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cmsf.evaluation.metrics import Accuracy, MeanAccuracy, accuracy_estimate, class_mean_estimate, in_top_k


def test_the_share_is_counted_and_its_interval_is_the_binomials() -> None:
    right = torch.arange(2000) % 5 < 4
    measure = accuracy_estimate(right)
    assert measure.value == 80
    deviation = 100 * sqrt(0.8 * 0.2 / 2000)
    assert measure.low == pytest.approx(80 - 1.96 * deviation, abs=0.25)
    assert measure.high == pytest.approx(80 + 1.96 * deviation, abs=0.25)


def test_mean_per_class_is_a_hand_count_and_a_small_class_weighs_as_much_as_a_large_one() -> None:
    truth = torch.tensor([0] * 8 + [4] * 2)
    right = torch.tensor([True] * 6 + [False] * 2 + [True, False])
    assert class_mean_estimate(right, truth).value == pytest.approx(100 * (6 / 8 + 1 / 2) / 2)
    assert accuracy_estimate(right).value == pytest.approx(70)
    spread = class_mean_estimate(right, truth)
    assert spread.low < spread.value < spread.high


def test_equal_classes_make_the_mean_per_class_the_share() -> None:
    truth = torch.arange(300) % 3
    right = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.6
    assert class_mean_estimate(right, truth).value == pytest.approx(accuracy_estimate(right).value)


def test_what_is_always_right_or_wrong_still_has_an_interval_and_a_repeat_is_the_same() -> None:
    """24 of 24 was 100.00 ± 0.0; by Wilson the rate may be as low as 24 / (24 + 1.96²) = 86.2 %."""
    for value, count in ((100, 24), (0, 24), (100, 50), (0, 50)):
        measure = accuracy_estimate(torch.full((count,), value == 100))
        free = 100 * (1 - count / (count + 1.959964**2))
        assert measure.value == value
        assert (measure.low, measure.high) == pytest.approx((100 - free, 100) if value else (0, free))
        assert 0 <= measure.low <= value <= measure.high + 1e-9 <= 100 + 1e-9
    mixed = torch.arange(97) % 3 > 0
    assert accuracy_estimate(mixed) == accuracy_estimate(mixed)


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    # Newcombe (1998), Table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_the_published_one_of_wilson(
    correct: int, count: int, low: float, high: float
) -> None:
    measure = accuracy_estimate(torch.arange(count) < correct)
    assert (measure.low, measure.high) == pytest.approx((100 * low, 100 * high), abs=0.006)


def test_wilsons_interval_holds_the_rates_that_a_search_over_all_rates_finds() -> None:
    for correct, count in ((3, 7), (0, 5), (40, 41), (500, 1000)):
        rates = torch.linspace(0, 1, 100_001, dtype=torch.float64)
        inside = (correct / count - rates).abs() <= 1.959964 * (rates * (1 - rates) / count).sqrt()
        measure = accuracy_estimate(torch.arange(count) < correct)
        found = rates[inside]
        assert (measure.low, measure.high) == pytest.approx((100 * float(found[0]), 100 * float(found[-1])), abs=2e-3)


def test_the_bootstrap_of_the_class_mean_is_a_slow_one() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.randint(7, (60,), generator=generator) * 3
    correct = torch.rand(60, generator=generator) < 0.7
    draws = torch.Generator().manual_seed(0)
    means = []
    for _ in range(1000):
        drawn = torch.randint(60, (60,), generator=draws)
        shares = [correct[drawn][truth[drawn] == number].double().mean() for number in truth[drawn].unique()]
        means.append(float(sum(shares)) / len(shares))
    low, high = np.quantile(means, [0.025, 0.975])
    measure = class_mean_estimate(correct, truth)
    assert (measure.low, measure.high) == pytest.approx((100 * low, 100 * high))


def test_the_bootstrap_at_imagenets_size_takes_memory_for_the_images_alone() -> None:
    """A matrix of 1,000 classes × 50,000 images took 0.8 GB, twice 400 MB."""
    truth = torch.arange(50_000) % 1000
    correct = torch.arange(50_000) % 7 > 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        measure = class_mean_estimate(correct, truth)
    held = largest = 0
    for event in profiler.events():
        if event.name == "[memory]":
            held += event.cpu_memory_usage
            largest = max(largest, held)
    assert 0 < largest < 40_000_000
    assert measure.low < measure.value < measure.high


def test_an_interval_covers_the_true_rate_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    inside = 0
    for _ in range(100):
        measure = accuracy_estimate(torch.rand(400, generator=generator) < 0.7)
        inside += measure.low <= 70 <= measure.high
    assert 87 <= inside <= 100


def test_top_k_counts_who_is_above_and_ties_go_to_the_lower_class() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.5, 0.5, 0.5], [0.3, 0.2, 0.1]])
    assert in_top_k(scores, torch.tensor([2, 1, 0]), 1).tolist() == [False, False, True]
    assert in_top_k(scores, torch.tensor([2, 1, 2]), 2).tolist() == [True, True, False]
    assert in_top_k(scores, torch.tensor([0, 2, 2]), 3).all()


def test_a_mean_of_sets_has_the_interval_of_independent_sets() -> None:
    """Distances to the ends in quadrature, over the number of sets; each set by the measure that it is quoted by."""
    truth = torch.tensor([0] * 60 + [1] * 20)
    right = torch.arange(80) % 3 > 0
    first, second = Accuracy(right, truth), Accuracy(~right, truth, per_class=True)
    report = MeanAccuracy([first, second]).report()
    mean = report[report["quoted"]]
    one, two = first.report()["accuracy"], second.report()["mean per class"]
    assert mean["value"] == pytest.approx((one["value"] + two["value"]) / 2)
    for end in ("low", "high"):
        distances = [each[end] - each["value"] for each in (one, two)]
        assert abs(mean[end] - mean["value"]) == pytest.approx((distances[0] ** 2 + distances[1] ** 2) ** 0.5 / 2)
    assert mean["low"] < mean["value"] < mean["high"]
    assert second.percent == pytest.approx(two["value"])
    assert second.percent != pytest.approx(Accuracy(~right, truth).percent)


def test_scores_that_are_no_numbers_are_never_right() -> None:
    truth = torch.tensor([0, 1, 1])
    scores = torch.tensor([[torch.nan, torch.nan], [torch.nan, 1.0], [0.0, torch.nan]])
    assert in_top_k(scores, truth, 1).tolist() == [False, True, False]


def test_a_mean_of_sets_that_are_all_right_does_not_reach_above_all() -> None:
    every = Accuracy(torch.ones(24, dtype=torch.bool), torch.arange(24) % 2)
    report = MeanAccuracy([every, every]).report()
    mean = report[report["quoted"]]
    assert (mean["value"], mean["high"]) == (100, pytest.approx(100))
    assert mean["low"] < 95
