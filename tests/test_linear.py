"""The linear layer against scikit-learn and against its own equation."""

import pytest
import torch
from helpers import noise
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cmsf.data import Dataset, Split
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, evaluate_linear, linear
from cmsf.evaluation.linear import LinearClassifier, LogisticLoss, fit_path


def problem(classes: int, images: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overlapping classes, so that no fit is perfect."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (images,), generator=generator)
    centres = 1.5 * torch.randn(classes, 8, generator=generator)
    return centres[label] + torch.randn(images, 8, generator=generator), label


def objective(layer: LinearClassifier, features: Tensor, label: Tensor, decay: float) -> Tensor:
    scores = features.double() @ layer.weight.double().T + layer.bias.double()
    return cross_entropy(scores, label) + decay / 2 * layer.weight.square().sum()


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("decay", [1.0, 1e-3])
def test_the_fit_minimises_cross_entropy_and_weight_decay(classes: int, decay: float) -> None:
    """Its gradient by autograd vanishes; for two classes too."""
    features, label = problem(classes)
    ((_, layer),) = fit_path(features, label, classes, (decay,))
    weight, bias = layer.weight.clone().requires_grad_(), layer.bias.clone().requires_grad_()
    objective(LinearClassifier(weight, bias), features, label, decay).backward()
    assert weight.grad.abs().max() < 1e-3
    assert bias.grad.abs().max() < 1e-3


def test_at_the_same_weight_decay_it_is_scikit_learns_logistic_regression() -> None:
    features, label = problem(4)
    decay = 1e-2
    ((_, layer),) = fit_path(features, label, 4, (decay,))
    theirs = LogisticRegression(C=1 / (len(label) * decay), tol=1e-8, max_iter=5000).fit(features.double(), label)
    same = LinearClassifier(torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_))
    ours, expected = (float(objective(one, features, label, decay)) for one in (layer, same))
    assert ours == pytest.approx(expected, abs=1e-3)
    assert torch.equal(layer(features).argmax(1), torch.from_numpy(theirs.predict(features.double())))


def test_a_path_of_weight_decays_ends_where_a_fit_from_nothing_does() -> None:
    features, label = problem(3)
    *_, (_, warm) = fit_path(features, label, 3, (1.0, 1e-2, 1e-4))
    ((_, cold),) = fit_path(features, label, 3, (1e-4,))
    gap = objective(warm, features, label, 1e-4) - objective(cold, features, label, 1e-4)
    assert abs(float(gap)) < 1e-3


def test_a_class_that_was_not_trained_on_is_never_chosen() -> None:
    features, label = problem(3)
    ((_, layer),) = fit_path(features, label * 2, 6, (1e-2,))  # classes 0, 2 and 4 of six
    scores = layer(features)
    assert set(scores.argmax(1).tolist()) <= {0, 2, 4}
    assert scores[:, 5].isinf().all()


def separable(images: int, seed: int) -> Split:
    """Images whose brightness says the class, with noise."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(images) % 3
    level = 60 * truth[:, None, None, None] + 40
    pixels = (level + 20 * torch.randn(images, 3, 12, 12, generator=generator)).clamp(0, 255).to(torch.uint8)
    return Split(pixels, [str(i) for i in range(images)], truth, truth)


def test_what_is_there_to_be_learned_is_found_and_noise_is_not() -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    names = ("a", "b", "c")
    data = Dataset("levels", names, names, separable(240, 0), separable(90, 1), "90 images")
    result = evaluate_linear(FeatureExtractor(backbone, Preprocessing(12)), data)
    assert result.accuracy["linear top-1"] > 90
    assert result.protocol["weight decay"] in (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
    report = result.report()["measures"]["linear top-1"]["accuracy"]
    assert report["low"] <= report["value"] <= report["high"]
    assert evaluate_linear(FeatureExtractor(backbone, Preprocessing(12)), noise(240, 90)).accuracy["linear top-1"] < 60


def test_a_fit_in_blocks_of_rows_ends_where_a_fit_of_all_rows_does(monkeypatch: pytest.MonkeyPatch) -> None:
    features, label = problem(5)
    rows = (torch.arange(len(label)) % 7 > 0).nonzero()[:, 0]
    weight, bias = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(5)
    whole = LogisticLoss(features[rows], label[rows], weight, bias, 1e-2)
    loss, gradient = whole(), (weight.grad.clone(), bias.grad.clone())
    assert LogisticLoss(features, label, weight, bias, 1e-2, rows)() == loss  # one block: to the bit
    assert torch.equal(weight.grad, gradient[0])
    monkeypatch.setattr(linear, "_BLOCK", 8 * 10)  # ten rows a block, the last one smaller
    blocks = LogisticLoss(features, label, weight, bias, 1e-2, rows)
    assert blocks() == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(weight.grad, gradient[0], atol=1e-7)
    assert torch.allclose(bias.grad, gradient[1], atol=1e-7)
    ((_, layer),) = fit_path(features, label, 5, (1e-2,), rows)
    monkeypatch.undo()
    ((_, at_once),) = fit_path(features[rows], label[rows], 5, (1e-2,))
    gap = objective(layer, features[rows], label[rows], 1e-2) - objective(at_once, features[rows], label[rows], 1e-2)
    assert abs(float(gap)) < 1e-5
