"""A linear classifier on frozen features, fitted to convergence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

from cmsf.data import Dataset
from cmsf.evaluation.features import LAYER, FeatureExtractor
from cmsf.evaluation.folds import FOLDS, validation_folds
from cmsf.evaluation.metrics import Accuracy, Result, in_top_k
from cmsf.evaluation.splits import describe_splits, evaluation_splits
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import progress_bar


@dataclass(frozen=True)
class LinearClassifier:
    """Computes W x + b; a class without training images has zero weights and a bias of −∞, so it is never chosen."""

    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"]
    diverged: bool = False

    def __call__(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n c"]:
        return torch.addmm(self.bias, features, self.weight.T)

    @classmethod
    def from_present(
        cls,
        weight: Float[Tensor, "p f"],
        bias: Float[Tensor, " p"],
        present: Int[Tensor, " p"],
        classes: int,
        diverged: bool = False,
    ) -> LinearClassifier:
        """Copies the weights of the classes that have training images into a classifier of all classes."""
        all_weights, all_biases = weight.new_zeros(classes, weight.shape[1]), bias.new_full((classes,), -torch.inf)
        all_weights[present], all_biases[present] = weight, bias
        return cls(all_weights, all_biases, diverged)


class NonFiniteLoss(Exception):
    """The loss is NaN or inf."""


class LogisticLoss:
    """Computes mean cross-entropy + decay / 2 |W|², with its gradient (softmax − one-hot)ᵀ X / n + decay W written by
    hand: two matrix products and little else. Autograd takes 4 % longer at 2,940 × 2,048 × 37 on a CPU.

    Rows are taken in blocks, so that beside the features there is memory for one block only.
    """

    def __init__(
        self,
        features: Float[Tensor, "n f"],
        label: Int[Tensor, " n"],
        weight: Float[Tensor, "c f"],
        bias: Float[Tensor, " c"],
        decay: float,
        rows: Int[Tensor, " m"] | None = None,
    ) -> None:
        """rows: those that are fitted; None: all."""
        self.evaluations = 0
        self._blocks, self._decay = RowBlocks(features, label, rows), decay
        self._weight, self._bias = weight, bias
        weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)

    @torch.no_grad()
    def __call__(self) -> float:
        self.evaluations += 1
        assert self._bias.grad is not None
        log_likelihood = self._bias.grad.zero_().new_zeros(())
        total, scale = self._weight, self._decay  # the first block adds to decay × W, the next ones to the sum so far
        for features, label in self._blocks:
            log_p = log_softmax(torch.addmm(self._bias, features, self._weight.T), 1)
            true = log_p.gather(1, label[:, None])
            log_likelihood += true.sum()
            wrong = log_p.exp_().scatter_add_(1, label[:, None], torch.full_like(true, -1)).div_(self._blocks.count)
            total, scale = torch.addmm(total, wrong.T, features, beta=scale, out=self._weight.grad), 1.0
            self._bias.grad += wrong.sum(0)
        loss = float(self._decay / 2 * self._weight.square().sum() - log_likelihood / self._blocks.count)
        if loss - loss != 0:
            raise NonFiniteLoss
        return loss


class RowBlocks:
    """Rows of features with their labels, a block at a time; what fits into one block is gathered once."""

    def __init__(self, features: Float[Tensor, "n f"], label: Int[Tensor, " n"], rows: Tensor | None = None) -> None:
        step = max(1, _BLOCK // features.shape[1])
        self.count = len(label) if rows is None else len(rows)
        if rows is not None and self.count <= step:
            features, label, rows = features[rows], label[rows], None
        self._features, self._label, self._rows, self._step = features, label, rows, step

    def __iter__(self) -> Iterator[tuple[Float[Tensor, "b f"], Int[Tensor, " b"]]]:
        for start in range(0, self.count, self._step):
            part = slice(start, start + self._step)
            chosen = part if self._rows is None else self._rows[part]
            yield self._features[chosen], self._label[chosen]


WEIGHT_DECAYS = tuple(10.0**power for power in range(0, -8, -1))
"""From strong to weak: each fit starts where the one before ended."""
STANDARDISED = f"{LAYER}, then standardised by the training images' mean and deviation"
_MAX_ITERATIONS = 500
_GRADIENT_TOLERANCE = 1e-5
_MIN_DEVIATION = 0.01
"""Of the median over dimensions."""
_BLOCK = 2**24
"""How many numbers of the features a block holds: 64 MB of float32."""


def evaluate_linear(extractor: FeatureExtractor, data: Dataset) -> Result:
    """Evaluates logistic regression on all training images, its weight decay chosen on held-out ones."""
    train, test = evaluation_splits(data)
    features = extractor(train)
    scale = StandardScaler.fit(features)
    layer, choice = fit_linear(scale.apply_(features), train.truth.to(features.device), len(data.classes))
    protocol = {
        "classifier": "one linear layer, cross-entropy, LBFGS to convergence, weight decay on the weights",
        **choice,
        "layer": STANDARDISED,
        **extractor.protocol(train, test),
        "augmentation": "none",
        **describe_splits(train, test, data),
    }
    scores = layer(scale.apply_(extractor(test))).cpu()
    return Result(top_k_accuracies("linear", scores, test.truth), protocol)


def top_k_accuracies(name: str, scores: Float[Tensor, "n c"], truth: Int[Tensor, " n"]) -> dict[str, Accuracy]:
    """Returns top-1 accuracy, and top-5 where there are more than five classes."""
    ks = (1, 5) if scores.shape[1] > 5 else (1,)
    return {f"{name} top-{k}": Accuracy.top_k(scores, truth, k) for k in ks}


@dataclass(frozen=True)
class StandardScaler:
    """Scales features to mean 0 and variance 1 in every dimension, over the images that it was fitted to."""

    mean: Float[Tensor, " f"]
    deviation: Float[Tensor, " f"]

    @classmethod
    def fit(cls, features: Float[Tensor, "n f"]) -> StandardScaler:
        deviation = features.std(0, correction=0)
        # A dimension that is nearly constant in these images would be blown up without bounds in others.
        return cls(features.mean(0), deviation.clamp_min(max(_MIN_DEVIATION * float(deviation.median()), 1e-6)))

    def __call__(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
        return (features - self.mean) / self.deviation

    def apply_(self, features: Float[Tensor, "n f"]) -> Float[Tensor, "n f"]:
        """Scales the features in place: at ImageNet's size there may be no memory for a second copy."""
        return features.sub_(self.mean).div_(self.deviation)


def fit_linear(
    features: Float[Tensor, "n f"], label: Int[Tensor, " n"], classes: int
) -> tuple[LinearClassifier, dict[str, Any]]:
    """Fits a classifier with the weight decay that is best on held-out images; returns also how that was chosen."""
    if len(label) < 2:
        raise BadInput(f"a linear classifier needs at least 2 labelled training images, and there are {len(label)}")
    folds = [held_out.to(label.device) for held_out in validation_folds(len(label))]
    paths = [fit_path(features, label, classes, WEIGHT_DECAYS, (~held_out).nonzero()[:, 0]) for held_out in folds]
    accuracy: dict[float, float] = {}
    with progress_bar("weight decays", len(WEIGHT_DECAYS) + 1) as update:
        for fits in zip(*paths, strict=True):
            decay = fits[0][0]
            correct = [
                in_top_k(layer(block).cpu(), its_label.cpu(), 1)
                for (_, layer), held_out in zip(fits, folds, strict=True)
                for block, its_label in RowBlocks(features, label, held_out.nonzero()[:, 0])
            ]
            accuracy[decay] = 100 * float(torch.cat(correct).double().mean())
            update(len(accuracy), f"held out {accuracy[decay]:.2f} %")
            if len(accuracy) > 2 and max(list(accuracy.values())[-2:]) < max(accuracy.values()):
                break  # two in a row are worse: weaker ones would only overfit more, and take the longest
        best = max(accuracy, key=lambda decay: (accuracy[decay], decay))
        update(len(WEIGHT_DECAYS), f"the best again, {best:g}, on all images")
        ((_, layer),) = fit_path(features, label, classes, (best,))
    held_out = f"{int(folds[0].sum())} of {len(label)}" if len(folds) == 1 else f"{FOLDS} folds of the"
    return layer, {
        "weight decay": best,
        "chosen on": f"{held_out} training images, by a hash",
        "validation accuracy by weight decay": {f"{decay:g}": value for decay, value in accuracy.items()},
    }


def fit_path(
    features: Float[Tensor, "n f"],
    label: Int[Tensor, " n"],
    classes: int,
    weight_decays: Sequence[float],
    rows: Int[Tensor, " m"] | None = None,
    tolerance: float = _GRADIENT_TOLERANCE,
) -> Iterator[tuple[float, LinearClassifier]]:
    """Minimises mean cross-entropy + decay / 2 |W|² to convergence, for each decay from where the last one ended.

    rows: those that are fitted; None: all.
    tolerance: of the largest part of the gradient.
    """
    present = (label if rows is None else label[rows]).unique()
    place = torch.searchsorted(present, label).clamp_max(len(present) - 1)  # of rows that are not fitted, any
    weight, bias = features.new_zeros(len(present), features.shape[1]), features.new_zeros(len(present))
    for decay in weight_decays:
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=_MAX_ITERATIONS,
            max_eval=2 * _MAX_ITERATIONS,
            tolerance_grad=tolerance,
            history_size=10,
            line_search_fn="strong_wolfe",
        )
        optimizer.step(LogisticLoss(features, place, weight, bias, decay, rows))
        yield decay, LinearClassifier.from_present(weight, bias, present, classes)
