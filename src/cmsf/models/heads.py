"""Heads on a backbone's features, and the SGD settings of heads that are trained on few examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD


def mlp(
    inputs: int, hidden: int, outputs: int, hidden_layers: int = 1, bias: bool = False, output_norm: bool = False
) -> nn.Sequential:
    """Builds an MLP: linear, BatchNorm and ReLU for each hidden layer, then linear.

    bias: of the hidden layers, where BatchNorm has one of its own.
    output_norm: whether BatchNorm without scale and shift follows.
    """
    layers: list[nn.Module] = []
    for _ in range(hidden_layers):
        layers += [nn.Linear(inputs, hidden, bias), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        inputs = hidden
    last = [nn.BatchNorm1d(outputs, affine=False)] if output_norm else []
    return nn.Sequential(*layers, nn.Linear(inputs, outputs), *last)


@dataclass(frozen=True, kw_only=True)
class SGDSettings:
    """SGD for a given number of epochs; with few examples more epochs, so that there are `min_steps` steps.

    The last incomplete batch of an epoch is dropped.
    """

    epochs: int
    lr: float
    batch: int = 256
    momentum: float = 0.9
    weight_decay: float = 1e-4
    min_steps: int

    def batch_and_epochs(self, count: int) -> tuple[int, int]:
        """Returns batch size and epochs for so many examples."""
        batch = self.batch_size_for(count)
        return batch, max(self.epochs, -(-self.min_steps // (count // batch)))

    def batch_size_for(self, count: int) -> int:
        return min(self.batch, count)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> SGD:
        return SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
