"""Perceptrons: what is put on a network's features, to embed them or to name them."""

from __future__ import annotations

from torch import nn


def mlp(
    inputs: int, hidden: int, outputs: int, hidden_layers: int = 1, bias: bool = False, output_norm: bool = False
) -> nn.Sequential:
    """Linear, BatchNorm and ReLU so many times, then linear.

    bias: of the hidden layers, where BatchNorm has one of its own.
    output_norm: whether BatchNorm without scale and shift follows.
    """
    layers: list[nn.Module] = []
    for _ in range(hidden_layers):
        layers += [nn.Linear(inputs, hidden, bias), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        inputs = hidden
    last = [nn.BatchNorm1d(outputs, affine=False)] if output_norm else []
    return nn.Sequential(*layers, nn.Linear(inputs, outputs), *last)
