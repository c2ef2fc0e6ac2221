"""The transfer protocol's classifier against autograd, torch's own optimiser and scikit-learn."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy

from cmsf.evaluation.linear import LinearClassifier, LogisticLoss
from cmsf.evaluation.transfer.trial import Settings, fit


def problem(classes: int = 4, images: int = 200) -> tuple[Tensor, Tensor]:
    """Overlapping classes, so that no fit is perfect."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(classes, (images,), generator=generator)
    centres = torch.randn(classes, 8, generator=generator)
    return centres[label] + torch.randn(images, 8, generator=generator), label


def objective(weight: Tensor, bias: Tensor, features: Tensor, label: Tensor, decay: float) -> Tensor:
    return cross_entropy(features @ weight.T + bias, label) + decay / 2 * weight.square().sum()


def test_the_gradient_by_hand_is_autograds() -> None:
    features, label = (tensor.double() if tensor.is_floating_point() else tensor for tensor in problem())
    weight, bias = torch.randn(4, 8).double(), torch.randn(4).double()
    ours = LogisticLoss(features, label, weight, bias, 0.1)
    loss = ours()
    theirs = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = objective(*theirs, features, label, 0.1)
    expected.backward()
    assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(weight.grad, theirs[0].grad)
    torch.testing.assert_close(bias.grad, theirs[1].grad)


@pytest.mark.parametrize("lr", [1.0, 0.05])
def test_some_steps_are_torchs_lbfgs_with_autograd(lr: float) -> None:
    """In double precision: in single, sixty updates make much of the last bit."""
    features, label = problem()
    features = features.double()
    weight, bias = (torch.zeros(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 8), (4,)))
    optimiser = torch.optim.LBFGS([weight, bias], lr=lr, max_iter=20, history_size=10)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = objective(weight, bias, features, label, 1e-2)
        loss.backward()
        return loss

    for _ in range(3):
        optimiser.step(closure)
    layer = fit(features, label, 4, Settings(3, lr, 1e-2))
    torch.testing.assert_close(layer.weight, weight.detach())
    torch.testing.assert_close(layer.bias, bias.detach())


def test_a_converged_fit_is_scikit_learns_logistic_regression() -> None:
    features, label = problem()
    decay = 1e-2
    layer = fit(features, label, 4, Settings(200, 1.0, decay))
    theirs = LogisticRegression(C=1 / (len(label) * decay), tol=1e-8, max_iter=5000).fit(features.double(), label)
    expected = objective(
        torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_), features.double(), label, decay
    )
    assert float(objective(layer.weight, layer.bias, features, label, decay)) == pytest.approx(
        float(expected), abs=1e-3
    )
    assert torch.equal(layer(features).argmax(1), torch.from_numpy(theirs.predict(features.double())))


def watched(settings: Settings) -> tuple[int, LinearClassifier]:
    seen: list[int] = []
    features, label = problem()
    layer = fit(features, label, 4, settings, lambda iteration, _: seen.append(iteration))
    assert seen == list(range(1, len(seen) + 1))
    return len(seen), layer


def test_a_converged_fit_stops_early_with_the_weights_it_would_have_ended_with() -> None:
    features, label = problem()
    settings = Settings(300, 0.5, 1e-2)
    steps, layer = watched(settings)
    assert steps < settings.iterations
    weight, bias = torch.zeros(4, 8), torch.zeros(4)
    optimiser = torch.optim.LBFGS([weight, bias], lr=0.5, max_iter=20, history_size=10)
    run_on = LogisticLoss(features, label, weight, bias, 1e-2)
    for _ in range(settings.iterations):
        optimiser.step(run_on)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.bias, bias)


def test_a_tiny_learning_rate_is_not_taken_for_convergence() -> None:
    """Its first step ends after one update, for the loss is the same to the last bit."""
    steps, layer = watched(Settings(5, 1e-6, 1e-9))
    assert steps == 5
    assert layer.weight.abs().max() > 0


@pytest.mark.parametrize("lr", [20.0, 1e30])
def test_a_fit_that_diverges_ends_with_its_last_finite_weights(lr: float) -> None:
    features, label = problem()
    layer = fit(features, label, 4, Settings(50, lr, 1e-2))
    assert layer.diverged
    assert layer.weight.isfinite().all()
    assert not fit(features, label, 4, Settings(50, 1.0, 1e-2)).diverged


def test_a_class_without_training_images_is_never_chosen() -> None:
    features, label = problem(3)
    layer = fit(features, 2 * label, 6, Settings(20, 1.0, 1e-3))  # classes 0, 2 and 4
    assert set(layer(features).argmax(1).tolist()) == {0, 2, 4}
    assert layer(features)[:, [1, 3, 5]].isneginf().all()
