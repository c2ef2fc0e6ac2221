"""Retrieval against a loop, and k-NN against scikit-learn."""

import numpy as np
import torch
from helpers import unit
from sklearn.neighbors import KNeighborsClassifier

from cmsf.evaluation.knn import KNNClassifier, classify, recall_at_k


def test_recall_is_what_a_loop_counts() -> None:
    train, query = unit(80, 6, 0), unit(40, 6, 1)
    generator = torch.Generator().manual_seed(0)
    label, truth = (torch.randint(12, (count,), generator=generator) for count in (80, 40))
    found = recall_at_k(query, train, label, truth)
    for k in (1, 5, 10):
        expected = []
        for vector, wanted in zip(query, truth.tolist(), strict=True):
            nearest = sorted(range(80), key=lambda row, vector=vector: -float(train[row] @ vector))[:k]
            expected.append(any(int(label[row]) == wanted for row in nearest))
        assert found[f"R@{k}"].tolist() == expected
    shares = [found[f"R@{k}"].double().mean() for k in (1, 5, 10)]
    assert shares[0] < shares[1] < shares[2]


def test_fewer_training_images_than_the_depth_are_all_looked_at() -> None:
    train, query = unit(3, 4, 0), unit(5, 4, 1)
    found = recall_at_k(query, train, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3, 0]))
    assert found["R@5"].tolist() == found["R@10"].tolist() == [True, True, True, False, True]


def test_k_nn_is_scikit_learns() -> None:
    """scikit-learn breaks equal votes for the lower class too; unit vectors make cosine and distance one order."""
    train, query = unit(500, 16, 0), unit(200, 16, 1)
    label = torch.randint(7, (500,), generator=torch.Generator().manual_seed(0))
    for k in (1, 20):
        theirs = KNeighborsClassifier(k, algorithm="brute").fit(train.numpy(), label.numpy())
        ours = classify(query, train, label, {"vote": KNNClassifier(k)})["vote"]
        assert np.array_equal(ours.numpy(), theirs.predict(query.numpy()))
