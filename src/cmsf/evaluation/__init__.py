"""How good frozen features are. Nothing here knows how they were learned."""

from cmsf.evaluation.knn import KnnProtocol, KnnResult, can_judge, evaluate_knn, evaluate_pixels

__all__ = ["KnnProtocol", "KnnResult", "can_judge", "evaluate_knn", "evaluate_pixels"]
