"""How good frozen features are. Nothing here knows how they were learned."""

from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.few_labels import Few, evaluate_few_labels, listed, seeded_shares
from cmsf.evaluation.knn import evaluate_knn, evaluate_pixels
from cmsf.evaluation.linear import evaluate_linear
from cmsf.evaluation.linear_sgd import evaluate_linear_sgd
from cmsf.evaluation.metrics import Result
from cmsf.evaluation.retrieval import evaluate_retrieval
from cmsf.evaluation.splits import can_judge

__all__ = [
    "FeatureExtractor",
    "Few",
    "Result",
    "can_judge",
    "evaluate_few_labels",
    "evaluate_knn",
    "evaluate_linear",
    "evaluate_linear_sgd",
    "evaluate_pixels",
    "evaluate_retrieval",
    "listed",
    "seeded_shares",
]
