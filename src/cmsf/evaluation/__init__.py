"""Evaluation of frozen features and of classifiers on them. Nothing here knows how they were learned."""

from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.few_labels import LabelSubset, evaluate_few_labels, seeded_subsets, subset_from_list
from cmsf.evaluation.knn import evaluate_knn, evaluate_pixels
from cmsf.evaluation.linear import evaluate_linear
from cmsf.evaluation.linear_sgd import evaluate_linear_sgd
from cmsf.evaluation.splits import can_evaluate

__all__ = [
    "FeatureExtractor",
    "LabelSubset",
    "can_evaluate",
    "evaluate_few_labels",
    "evaluate_knn",
    "evaluate_linear",
    "evaluate_linear_sgd",
    "evaluate_pixels",
    "seeded_subsets",
    "subset_from_list",
]
