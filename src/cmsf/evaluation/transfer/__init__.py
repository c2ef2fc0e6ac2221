"""Transfer to other data sets: a linear layer on frozen features, its settings found by hyperparameter search."""

from cmsf.evaluation.transfer.datasets import paper_suite, read_suite
from cmsf.evaluation.transfer.evaluate import evaluate_transfer
from cmsf.evaluation.transfer.tune import TRIALS, make_tuner

__all__ = ["TRIALS", "evaluate_transfer", "make_tuner", "paper_suite", "read_suite"]
