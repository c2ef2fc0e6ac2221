"""The linear layer on few labels: its equation, scikit-learn's, and how C and temperature are chosen."""

import math

import pytest
import torch
from helpers import unit
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from cmsf.evaluation import logistic
from cmsf.evaluation.folds import ENOUGH_FOR_A_TENTH, stratified_folds
from cmsf.evaluation.linear import LinearClassifier, StandardScaler, fit_path
from cmsf.evaluation.logistic import LogisticFit, fit_logistic, fit_temperature, strongest_near_best
from cmsf.utils.errors import BadInput

CLASSES, WIDTH, TEST = 5, 40, 400

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(counts: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """So many labelled images a class, and test images: L2-normalised, few dimensions vary much and tell classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(counts), WIDTH, generator=generator)
    deviation = torch.logspace(0.5, -1.5, WIDTH)

    def images(label: Tensor) -> Tensor:
        noise = torch.randn(len(label), WIDTH, generator=generator)
        return normalize(1.2 * deviation**2 * centres[label] + deviation * noise + 1, dim=1)

    label = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    truth = torch.arange(TEST) % len(counts)
    return images(label), label, images(truth), truth


def accuracy(scores: Tensor, truth: Tensor) -> float:
    return 100 * float((scores.argmax(1) == truth).double().mean())


def without_temperature(fit: LogisticFit) -> LinearClassifier:
    temperature = fit.choice["temperature"]
    return LinearClassifier(fit.layer.weight * temperature, fit.layer.bias * temperature)


@pytest.mark.parametrize("counts", [[6] * CLASSES, [3, 20]])
def test_the_fit_minimises_c_times_cross_entropy_and_half_the_squared_weights(counts: list[int]) -> None:
    """On the features as they are, and as far as scikit-learn does at the same C."""
    features, label, *_ = draw(counts, 0)
    fit = fit_logistic(features, label, len(counts))

    def objective(layer: LinearClassifier) -> float:
        total = float(layer.weight.double().square().sum()) / 2
        for image, own in zip(features.double(), label.tolist(), strict=True):
            scores = layer.weight.double() @ image + layer.bias.double()
            total -= fit.choice["C"] * float(scores[own] - scores.logsumexp(0))
        return total

    theirs = LogisticRegression(C=fit.choice["C"], tol=1e-10, max_iter=10_000).fit(features.double(), label)
    weight, bias = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
    if len(counts) == 2:  # theirs has the difference of two rows, which are then each other's negatives
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
        expected = objective(LinearClassifier(weight, bias))
        assert objective(without_temperature(fit)) <= expected * (1 + 1e-3)
    else:
        expected = objective(LinearClassifier(weight, bias))
        assert objective(without_temperature(fit)) == pytest.approx(expected, rel=1e-3)


def test_with_one_label_a_class_it_is_scikit_learns_default() -> None:
    features, label, test, _ = draw([1] * CLASSES, 1)
    fit = fit_logistic(features, label, CLASSES)
    theirs = LogisticRegression(tol=1e-8).fit(features.double(), label)
    assert (fit.choice["C"], fit.choice["temperature"], len(fit.correct)) == (1.0, 1.0, 0)
    assert fit.choice["chosen on"] == "nothing: no class has two labels"
    expected = torch.from_numpy(theirs.predict_proba(test.double()))
    torch.testing.assert_close(fit.layer(test).double().softmax(1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("labels", [1, 5, 10])
def test_on_few_labels_it_is_no_worse_than_scikit_learn_and_better_than_standardised_features(labels: int) -> None:
    ours, theirs, standardised = [], [], []
    for seed in range(3):
        features, label, test, truth = draw([labels] * CLASSES, seed)
        ours.append(accuracy(fit_logistic(features, label, CLASSES).layer(test), truth))
        sklearn = LogisticRegression().fit(features.numpy(), label.numpy())
        theirs.append(accuracy(torch.from_numpy(sklearn.decision_function(test.numpy())), truth))
        scale = StandardScaler.fit(features)
        ((_, layer),) = fit_path(scale(features), label, CLASSES, (0.1,))
        standardised.append(accuracy(layer(scale(test)), truth))
    assert sum(ours) / 3 > sum(theirs) / 3 - 0.3
    assert sum(ours) / 3 > sum(standardised) / 3


def test_of_classes_of_unequal_size_the_small_ones_are_found_too() -> None:
    """Where C = 1 would leave little but the bias."""
    features, label, test, truth = draw([40, 4, 4, 4], 3)
    fit = fit_logistic(features, label, 4)
    theirs = LogisticRegression().fit(features.numpy(), label.numpy())
    assert fit.choice["C"] > 1
    assert accuracy(fit.layer(test), truth) > 5 + 100 * theirs.score(test.numpy(), truth.numpy())


def test_the_temperature_is_that_of_a_search_over_the_equation() -> None:
    scores, label = 7 * unit(9, 4, 0), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    scores[torch.arange(9), label] += 2

    def loss(temperature: float) -> float:
        """Each image n times with its class, and once with any of the four."""
        total = 0.0
        for row, own in zip(scores.tolist(), label.tolist(), strict=True):
            normaliser = math.log(sum(math.exp(score / temperature) for score in row))
            for number, score in enumerate(row):
                total -= (9 * (number == own) + 1 / 4) / 10 * (score / temperature - normaliser)
        return total

    found = fit_temperature(scores, label)
    grid = [found * 1.005**power for power in range(-600, 601)]
    assert min(grid, key=loss) == found


def test_a_few_right_answers_are_no_certainty() -> None:
    label = torch.arange(10) % 2
    scores = 0.01 * torch.nn.functional.one_hot(label, 2).float()
    confidence = (scores / fit_temperature(scores, label)).softmax(1).amax(1)
    assert confidence.tolist() == pytest.approx([(10 + 1 / 2) / 11] * 10, abs=1e-4)
    assert (scores.flip(1) / fit_temperature(scores.flip(1), label)).softmax(1).amax() < 0.51  # all of them wrong


def test_the_least_c_within_a_standard_error_of_the_best_is_taken() -> None:
    def trial(c: float, *loss: float) -> logistic._Trial:
        return logistic._Trial(c, 1.0, torch.ones(len(loss), dtype=torch.bool), torch.tensor(loss).double())

    best = trial(10, 1, 1, 1, 1)
    apart, close = trial(1, 2, 2, 0.6, 3.4), trial(3, 0.5, 0.5, 1, 5)
    for other, within in ((apart, False), (close, True)):
        excess = [one - least for one, least in zip(other.loss.tolist(), best.loss.tolist(), strict=True)]
        average = sum(excess) / 4
        error = math.sqrt(sum((one - average) ** 2 for one in excess) / 4 / 4)
        assert (average <= error) == within
        assert strongest_near_best([other, best, trial(30, 9, 9, 9, 9)]) is (other if within else best)
    assert strongest_near_best([apart, close, best]) is close


def test_every_image_of_a_class_of_two_or_more_is_held_out_once_and_its_class_stays() -> None:
    label = torch.tensor([0] * 7 + [1] * 2 + [2] + [3] * 5)[torch.randperm(15)]
    folds = stratified_folds(label)
    assert len(folds) == 5
    assert torch.equal(torch.stack(folds).sum(0), (label != 2).long())
    assert {int(rows.sum()) for rows in folds} == {2, 3}
    for rows in folds:
        assert torch.equal(label[~rows].unique(), label.unique())
        assert label[rows].bincount(minlength=4).tolist()[3] == 1
    assert stratified_folds(torch.arange(4)) == []
    assert [int(rows.sum()) for rows in stratified_folds(torch.tensor([0, 0, 1]))] == [1, 1]


def test_of_many_images_a_tenth_of_each_class_is_held_out() -> None:
    label = torch.arange(ENOUGH_FOR_A_TENTH) % 4
    (rows,) = stratified_folds(label)
    assert label[rows].bincount().tolist() == [125] * 4


def test_a_class_without_labels_is_never_chosen_and_one_image_is_refused() -> None:
    features, label, test, _ = draw([4] * 3, 0)
    layer = fit_logistic(features, label * 2, 6).layer
    assert set(layer(test).argmax(1).tolist()) == {0, 2, 4}
    with pytest.raises(BadInput, match="at least 2 labelled training images, and there are 1"):
        fit_logistic(features[:1], label[:1], 3)


def test_the_scores_say_how_sure_to_be() -> None:
    features, label, test, truth = draw([10] * CLASSES, 0)
    fit = fit_logistic(features, label, CLASSES)
    assert cross_entropy(fit.layer(test), truth) < 0.8 * cross_entropy(without_temperature(fit)(test), truth)
