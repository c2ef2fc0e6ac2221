"""Perceptrons: what is put on a network's features, to embed them or to name them."""

from __future__ import annotations

from torch import nn


def perceptron(inputs: int, hidden: int, outputs: int, hidden_layers: int = 1, bias: bool = False) -> nn.Sequential:
    """Linear, BatchNorm and ReLU so many times, then linear; nothing normalises the output.

    bias: of the hidden layers, where BatchNorm has one of its own.
    """
    layers: list[nn.Module] = []
    for _ in range(hidden_layers):
        layers += [nn.Linear(inputs, hidden, bias), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True)]
        inputs = hidden
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))
