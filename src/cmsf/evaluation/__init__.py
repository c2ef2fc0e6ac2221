"""How good frozen features are. Nothing here knows how they were learned."""

from cmsf.evaluation.judged import can_judge
from cmsf.evaluation.knn import evaluate_knn, evaluate_pixels
from cmsf.evaluation.linear import evaluate_linear
from cmsf.evaluation.measures import Result
from cmsf.evaluation.retrieval import evaluate_retrieval

__all__ = ["Result", "can_judge", "evaluate_knn", "evaluate_linear", "evaluate_pixels", "evaluate_retrieval"]
