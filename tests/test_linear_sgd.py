"""The paper's linear protocol against its equations, and against the fast one."""

import pytest
import torch
from helpers import noise_split
from test_linear import objective, problem, separable
from torch import Tensor, nn

from cmsf.data import Dataset
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, evaluate_linear_sgd
from cmsf.evaluation.linear import StandardScaler, fit_path
from cmsf.evaluation.linear_sgd import LinearSGDSchedule, fit_by_sgd


def batches(features: Tensor, epochs: int, size: int) -> list[tuple[int, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (epoch, index, features[index])
        for epoch in range(epochs)
        for index in torch.randperm(len(features), generator=generator).split(size)
    ]


def test_the_steps_are_those_of_momentum_sgd_with_a_dropping_rate() -> None:
    """Softmax, its gradient and the update written out by hand."""
    features, label = problem(3, images=60)
    features = features.double()
    schedule = LinearSGDSchedule(102_400)
    plan = batches(features, 40, 20)
    layer = fit_by_sgd(iter(plan), features, label, 3, schedule)

    weight, bias = torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    speed = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for epoch, index, seen in plan:
        lr = 0.01 if epoch < 15 else 0.001 if epoch < 30 else 0.0001
        scores = seen @ weight.T + bias
        share = scores.exp() / scores.exp().sum(1, keepdim=True)
        for row, image in enumerate(index.tolist()):
            share[row, label[image]] -= 1
        slopes = [share.T @ seen / len(seen) + 1e-4 * weight, share.mean(0) + 1e-4 * bias]
        for number, (value, slope) in enumerate(zip((weight, bias), slopes, strict=True)):
            speed[number] = 0.9 * speed[number] + slope
            value -= lr * speed[number]
    torch.testing.assert_close(layer.weight, weight)
    torch.testing.assert_close(layer.bias, bias)


@pytest.mark.parametrize(
    ("images", "epochs", "rate", "drops"),
    [
        (1_281_167, 40, 0.01, (15, 30)),
        (102_400, 40, 0.01, (15, 30)),
        (50_000, 40, 0.0204, (15, 30)),
        (10_000, 40, 0.1, (15, 30)),
        (1_000, 400, 0.1, (150, 300)),
    ],
)
def test_the_papers_course_and_more_of_it_where_images_are_few(
    images: int, epochs: int, rate: float, drops: tuple[int, int]
) -> None:
    schedule = LinearSGDSchedule(images)
    assert (schedule.epochs, schedule.drops) == (epochs, drops)
    assert schedule.rate == pytest.approx(rate, rel=1e-2)


def test_both_optimisers_agree_within_half_a_point_on_the_same_features() -> None:
    """At the same weight decay, 4,000 training and 2,000 test images of ten overlapping classes."""
    features, label = problem(10, images=6000)
    scale = StandardScaler.fit(features[:4000])
    known, asked = scale(features[:4000]), scale(features[4000:])
    schedule = LinearSGDSchedule(4000)
    by_sgd = fit_by_sgd(iter(batches(known, schedule.epochs, 256)), known, label[:4000], 10, schedule)
    ((_, converged),) = fit_path(known, label[:4000], 10, (1e-4,))
    ours, theirs = (
        100 * float((layer(asked).argmax(1) == label[4000:]).double().mean()) for layer in (by_sgd, converged)
    )
    assert 50 < theirs < 95
    assert abs(ours - theirs) <= 0.5
    losses = [float(objective(layer, known, label[:4000], 1e-4)) for layer in (by_sgd, converged)]
    assert losses[1] <= losses[0] < losses[1] + 0.05


def test_the_protocol_reports_the_effect_of_augmentation_and_leaves_the_network_alone() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).train()
    names = ("a", "b", "c")
    data = Dataset("levels", names, names, separable(90, 0), separable(90, 1), "90 images")
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    result = evaluate_linear_sgd(FeatureExtractor(backbone, Preprocessing(12)), data)
    assert backbone.training
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert result.accuracy["SGD clean top-1"] > 80
    effect = result.accuracy["SGD top-1"] - result.accuracy["SGD clean top-1"]
    assert result.protocol["effect of augmentation on top-1, points"] == pytest.approx(effect)
    assert abs(result.protocol["LBFGS to convergence at this weight decay, clean, top-1"] - 90) <= 10


def test_random_views_are_other_views_in_every_epoch() -> None:
    from cmsf.evaluation.linear_sgd import _random_views

    backbone = nn.Sequential(nn.Flatten())
    index = torch.arange(5)
    first, second, again = (
        next(_random_views(FeatureExtractor(backbone, Preprocessing(12)), noise_split(5, 0), [(epoch, index)]))[2]
        for epoch in (0, 1, 0)
    )
    assert not torch.allclose(first, second)
    assert torch.equal(first, again)
