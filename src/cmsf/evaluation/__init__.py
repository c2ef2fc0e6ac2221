"""How good frozen features are. Nothing here knows how they were learned."""

from cmsf.evaluation.knn import KnnResult, can_judge, evaluate_knn, evaluate_pixels

__all__ = ["KnnResult", "can_judge", "evaluate_knn", "evaluate_pixels"]
