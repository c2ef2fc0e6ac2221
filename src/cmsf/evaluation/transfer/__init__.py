"""Transfer to other data sets: which they are, how they are divided, the search for a linear layer's settings."""

from cmsf.evaluation.transfer.evaluate import evaluate_transfer
from cmsf.evaluation.transfer.search import TRIALS, make_search
from cmsf.evaluation.transfer.suite import paper_suite, read_suite

__all__ = ["TRIALS", "evaluate_transfer", "make_search", "paper_suite", "read_suite"]
