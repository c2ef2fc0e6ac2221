"""Measures against hand counts and against the binomial that a bootstrap of a share stands for."""

from math import sqrt

import pytest
import torch

from cmsf.evaluation.metrics import Judged, MeanOf, hits, mean_per_class, share


def test_the_share_is_counted_and_its_interval_is_the_binomials() -> None:
    right = torch.arange(2000) % 5 < 4
    measure = share(right)
    assert measure.value == 80
    deviation = 100 * sqrt(0.8 * 0.2 / 2000)
    assert measure.low == pytest.approx(80 - 1.96 * deviation, abs=0.25)
    assert measure.high == pytest.approx(80 + 1.96 * deviation, abs=0.25)


def test_mean_per_class_is_a_hand_count_and_a_small_class_weighs_as_much_as_a_large_one() -> None:
    truth = torch.tensor([0] * 8 + [4] * 2)
    right = torch.tensor([True] * 6 + [False] * 2 + [True, False])
    assert mean_per_class(right, truth).value == pytest.approx(100 * (6 / 8 + 1 / 2) / 2)
    assert share(right).value == pytest.approx(70)
    spread = mean_per_class(right, truth)
    assert spread.low < spread.value < spread.high


def test_equal_classes_make_the_mean_per_class_the_share() -> None:
    truth = torch.arange(300) % 3
    right = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.6
    assert mean_per_class(right, truth).value == pytest.approx(share(right).value)


def test_what_is_always_right_or_wrong_has_no_spread_and_a_repeat_is_the_same() -> None:
    for value, right in ((100, torch.ones(50, dtype=torch.bool)), (0, torch.zeros(50, dtype=torch.bool))):
        measure = share(right)
        assert (measure.value, measure.low, measure.high) == (value, value, value)
    mixed = torch.arange(97) % 3 > 0
    assert share(mixed) == share(mixed)


def test_an_interval_covers_the_true_rate_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(1)
    inside = 0
    for _ in range(100):
        measure = share(torch.rand(400, generator=generator) < 0.7)
        inside += measure.low <= 70 <= measure.high
    assert 87 <= inside <= 100


def test_top_k_counts_who_is_above_and_ties_go_to_the_lower_class() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.5, 0.5, 0.5], [0.3, 0.2, 0.1]])
    assert hits(scores, torch.tensor([2, 1, 0]), 1).tolist() == [False, False, True]
    assert hits(scores, torch.tensor([2, 1, 2]), 2).tolist() == [True, True, False]
    assert hits(scores, torch.tensor([0, 2, 2]), 3).all()


def test_a_mean_of_sets_has_the_interval_of_independent_sets() -> None:
    """Half of each interval in quadrature, over the number of sets; each set by the measure that it is quoted by."""
    truth = torch.tensor([0] * 60 + [1] * 20)
    right = torch.arange(80) % 3 > 0
    first, second = Judged(right, truth), Judged(~right, truth, per_class=True)
    report = MeanOf([first, second]).report()
    mean = report[report["quoted"]]
    one, two = first.report()["accuracy"], second.report()["mean per class"]
    assert mean["value"] == pytest.approx((one["value"] + two["value"]) / 2)
    halves = [(each["high"] - each["low"]) / 2 for each in (one, two)]
    assert (mean["high"] - mean["low"]) / 2 == pytest.approx((halves[0] ** 2 + halves[1] ** 2) ** 0.5 / 2)
    assert second.figure == pytest.approx(two["value"])
    assert second.figure != pytest.approx(Judged(~right, truth).figure)


def test_scores_that_are_no_numbers_are_never_right() -> None:
    truth = torch.tensor([0, 1, 1])
    scores = torch.tensor([[torch.nan, torch.nan], [torch.nan, 1.0], [0.0, torch.nan]])
    assert hits(scores, truth, 1).tolist() == [False, True, False]
