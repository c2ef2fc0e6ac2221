"""Optuna without its log of every trial, and without warnings that its own defaults give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.exceptions import ExperimentalWarning


@contextmanager
def quietly() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    # What fails is raised as well.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
