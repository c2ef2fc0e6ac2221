from dataclasses import asdict
from math import cos, pi

import pytest

from cmsf.recipes.recipe import Recipe, ResolvedRecipe
from cmsf.training.schedule import Schedule

USUAL = Recipe().filled(ResolvedRecipe.usual())


def schedule(**changes: object) -> Schedule:
    numbers = {"bank_size": 1, "batch_size": 2, "size": 8, "projection_hidden": 1, "projection_dim": 2, "epochs": 20}
    others = {"weak_crop": 0.2, "strong_crop": 0.2, "extra_size": 8, "cache": "ram", "prediction_hidden": 1}
    support = {"support_classes": 0, "support_images": 0}
    return Schedule(
        ResolvedRecipe(**(asdict(USUAL) | numbers | others | support | changes)),
        steps_per_epoch=10,
    )


def test_the_learning_rate_falls_to_zero_by_a_cosine() -> None:
    lr = schedule(lr=0.4).lr
    assert lr(0) == 0.4
    assert lr(100) == pytest.approx(0.2)
    assert [lr(step) for step in range(200)] == pytest.approx([0.2 * (1 + cos(pi * s / 200)) for s in range(200)])
    assert lr(200) == pytest.approx(0, abs=1e-12)


def test_warm_up_rises_to_where_the_cosine_starts() -> None:
    lr = schedule(lr=1.0, warmup_epochs=5).lr
    assert lr(0) == pytest.approx(1 / 50)
    assert lr(49) == lr(50) == 1.0
    steps = [lr(step + 1) - lr(step) for step in range(199)]
    assert max(abs(change) for change in steps) < 0.03
    assert lr(200) == pytest.approx(0, abs=1e-12)


def test_in_steps_the_learning_rate_falls_to_a_tenth_after_each_third() -> None:
    lr = schedule(lr=1.0, epochs=90, lr_schedule="step").lr
    assert [lr(epoch * 10) for epoch in (0, 29, 30, 59, 60, 89)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert lr(299) == 1.0
    after_warm_up = schedule(lr=1.0, epochs=35, warmup_epochs=5, lr_schedule="step").lr
    assert [after_warm_up(step) for step in (49, 50, 149, 150)] == pytest.approx([1, 1, 1, 0.1])


def test_the_target_momentum_goes_from_its_first_to_its_last_value() -> None:
    momentum = schedule(target_momentum=0.9, target_momentum_end=1.0).target_momentum
    assert momentum(0) == pytest.approx(0.9)
    assert momentum(100) == pytest.approx(0.95)
    assert momentum(200) == pytest.approx(1.0)
    assert schedule(target_momentum=0.99, target_momentum_end=0.99).target_momentum(57) == pytest.approx(0.99)
