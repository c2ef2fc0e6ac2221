from collections import Counter
from math import exp

import pytest
import torch
from helpers import noise, noise_split, unit
from torch import Tensor, nn

from cmsf.data import Dataset, Split
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, evaluate_knn, evaluate_pixels
from cmsf.evaluation import features as features_module
from cmsf.evaluation.knn import KNNClassifier, classify
from cmsf.utils.errors import BadInput


def slow_vote(query: Tensor, train: Tensor, label: Tensor, k: int, temperature: float | None) -> list[int]:
    chosen = []
    for vector in query:
        nearest = sorted(range(len(train)), key=lambda j: (-float(vector @ train[j]), j))[:k]
        votes: Counter[int] = Counter()
        for j in nearest:
            votes[int(label[j])] += 1 if temperature is None else exp(float(vector @ train[j]) / temperature)
        chosen.append(min(votes, key=lambda c: (-votes[c], c)))
    return chosen


@pytest.mark.parametrize("k", [1, 2, 7, 20])
@pytest.mark.parametrize("temperature", [None, 0.07])
def test_votes_equal_a_slow_count(k: int, temperature: float | None) -> None:
    train, query = unit(120, 5, 0), unit(60, 5, 1)
    label = torch.randint(6, (120,), generator=torch.Generator().manual_seed(0))
    votes = {"asked": KNNClassifier(k, temperature), "another": KNNClassifier(30)}
    assert classify(query, train, label, votes)["asked"].tolist() == slow_vote(query, train, label, k, temperature)


def test_equal_distances_go_to_the_lower_row_and_equal_votes_to_the_lower_class() -> None:
    train = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    label = torch.tensor([2, 1, 1, 0])
    query = torch.tensor([[1.0, 0.0]])
    guesses = classify(query, train, label, {str(k): KNNClassifier(k) for k in (1, 2, 3)})
    assert {k: guess.tolist() for k, guess in guesses.items()} == {"1": [2], "2": [1], "3": [1]}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def test_a_result_records_all_that_is_needed_to_repeat_it() -> None:
    result = evaluate_knn(FeatureExtractor(network(), Preprocessing(12)), noise(60, 30))
    assert set(result.accuracy) == {"1-nn", "20-nn", "20-nn weighted"}
    assert {"votes", "layer", "transform", "train images", "test images", "classes"} <= set(result.protocol)
    assert result.protocol["votes"]["1-nn"] == {"k": 1, "vote": "majority", "temperature": None}
    assert result.protocol["votes"]["20-nn weighted"]["temperature"] == 0.07
    assert result.protocol["train images"] == 60
    assert result.protocol["test images"] == 30


def test_accuracy_is_the_share_of_right_votes_of_normalised_features() -> None:
    backbone, images = network().eval(), noise(60, 30)
    known, query = (FeatureExtractor(backbone, Preprocessing(12))(part) for part in (images.train, images.test))
    torch.testing.assert_close(known.norm(dim=1), torch.ones(60))
    right = [
        guess == int(truth)
        for guess, truth in zip(slow_vote(query, known, images.train.truth, 20, None), images.test.truth, strict=True)
    ]
    assert evaluate_knn(FeatureExtractor(backbone, Preprocessing(12)), images).accuracy["20-nn"] == pytest.approx(
        100 * sum(right) / 30
    )


def test_evaluating_neither_trains_the_network_nor_leaves_it_in_another_mode() -> None:
    backbone = network().train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    evaluate_knn(FeatureExtractor(backbone, Preprocessing(12)), noise(60, 30))
    assert backbone.training
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name])


def test_features_do_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FeatureExtractor(network(), Preprocessing(12))(noise_split(60, 0))
    monkeypatch.setattr(features_module, "BATCH", 7)
    torch.testing.assert_close(
        FeatureExtractor(network(), Preprocessing(12))(noise_split(60, 0)), whole, rtol=0, atol=1e-6
    )


def test_raw_pixels_find_an_image_that_is_there_already() -> None:
    images = noise_split(40, 0)
    same = Dataset("same", ("a", "b", "c"), ("a", "b", "c"), images, images, "the same")
    assert evaluate_pixels(same, Preprocessing(12)).accuracy["1-nn"] == 100


def test_unlabelled_data_cannot_be_judged_and_says_so() -> None:
    none = torch.full((9,), -1)
    unlabelled = Split(noise_split(9, 0).images, list("abcdefghi"), none, none)
    with pytest.raises(BadInput, match="no labels to evaluate with"):
        evaluate_knn(FeatureExtractor(network(), Preprocessing(12)), Dataset("flat", (), (), unlabelled, None, "none"))
