"""The table of classes: equal to a slow count, and to the accuracy that k-NN reports."""

from collections import Counter

import pytest
import torch
from helpers import noise, unit
from torch import Tensor, nn

from cmsf.analysis.per_class import class_report
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, evaluate_knn
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

NAMES = ("ant", "bee", "cat", "dog")


def labels_of(count: int, seed: int, classes: int = 4) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def slow(
    train: Tensor, train_class: list[int], query: Tensor, truth: list[int], leave_out: bool
) -> list[tuple[int, int, float]]:
    """Truth, guess and purity of each evaluated image."""
    found = []
    for i, vector in enumerate(query):
        rows = [j for j in range(len(train)) if train_class[j] != UNKNOWN and not (leave_out and i == j)]
        rows = sorted(rows, key=lambda j: (-float(vector @ train[j]), j))
        votes = Counter(train_class[j] for j in rows[:20])
        guess = min(votes, key=lambda c: (-votes[c], c))
        if truth[i] != UNKNOWN:
            near = [train_class[j] == truth[i] for j in rows[:5]]
            found.append((truth[i], guess, sum(near) / len(near)))
    return found


@pytest.mark.parametrize("with_test", [True, False])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
@pytest.mark.parametrize("count", [60, 4])
def test_the_table_equals_a_slow_count(with_test: bool, unknown: float, count: int) -> None:
    train, train_class = unit(count, 4, 0), labels_of(count, 1)
    query, truth = unit(40, 4, 2), labels_of(40, 3)
    for label in (train_class[2:], truth):
        label[torch.rand(len(label), generator=torch.Generator().manual_seed(4)) < unknown] = UNKNOWN
    if with_test:
        found = class_report(NAMES, train, train_class, query, truth)
        expected = slow(train, train_class.tolist(), query, truth.tolist(), leave_out=False)
    else:
        found = class_report(NAMES, train, train_class)
        expected = slow(train, train_class.tolist(), train, train_class.tolist(), leave_out=True)
    assert found.left_out is not with_test
    present = {*train_class.tolist(), *(truth.tolist() if with_test else ())} - {UNKNOWN}
    assert [row.name for row in found.rows] == [NAMES[c] for c in sorted(present)]
    for row in found.rows:
        number = NAMES.index(row.name)
        mine = [one for one in expected if one[0] == number]
        assert row.train == int((train_class == number).sum())
        assert row.test == (int((truth == number).sum()) if with_test else 0)
        assert row.evaluated == len(mine)
        if not mine:
            assert (row.accuracy, row.purity, row.taken_for) == (None, None, ())
            continue
        assert row.accuracy == pytest.approx(sum(true == guess for true, guess, _ in mine) / len(mine))
        assert row.purity == pytest.approx(sum(pure for *_, pure in mine) / len(mine))
        wrong = Counter(guess for true, guess, _ in mine if guess != true)
        order = sorted(wrong, key=lambda c: (-wrong[c], c))[:3]
        assert [(one.name, one.images) for one in row.taken_for] == [(NAMES[c], wrong[c]) for c in order]
        assert [one.share for one in row.taken_for] == pytest.approx([wrong[c] / len(mine) for c in order])
    either = Counter(tuple(sorted((true, guess))) for true, guess, _ in expected if true != guess)
    order = sorted(either, key=lambda pair: (-either[pair], pair))[:10]
    assert [(pair.first, pair.second, pair.images) for pair in found.pairs] == [
        (NAMES[a], NAMES[b], either[a, b]) for a, b in order
    ]
    evaluated = Counter(true for true, *_ in expected)
    assert [pair.share for pair in found.pairs] == pytest.approx(
        [either[a, b] / (evaluated[a] + evaluated[b]) for a, b in order]
    )


def test_its_accuracy_is_that_of_k_nn() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    data, features = noise(60, 30), FeatureExtractor(network, Preprocessing(12))
    assert data.test is not None
    table = class_report(data.classes, features(data.train), data.train.truth, features(data.test), data.test.truth)
    right = sum((row.accuracy or 0) * row.evaluated for row in table.rows)
    assert 100 * right / 30 == pytest.approx(evaluate_knn(features, data).accuracy["20-nn"])


def test_an_image_does_not_vote_for_itself_but_its_duplicate_does() -> None:
    train = torch.cat([unit(1, 6, 0).expand(2, -1), unit(40, 6, 1)])
    label = torch.tensor([0, 0] + [1] * 40)
    ant, bee = class_report(NAMES, train, label).rows
    assert (ant.evaluated, ant.purity) == (2, 0.2)  # one of the five nearest is of the class, and it is not itself
    assert ant.taken_for[0].name == "bee"
    assert bee.accuracy == 1.0


def test_a_class_with_one_image_is_never_recognised_without_test_images() -> None:
    table = class_report(NAMES, unit(30, 5, 3), torch.tensor([0] * 29 + [3]))
    alone = table.rows[1]
    assert (alone.name, alone.train, alone.test, alone.evaluated, alone.accuracy, alone.purity) == (
        "dog",
        1,
        0,
        1,
        0.0,
        0,
    )
    assert [(one.name, one.share) for one in alone.taken_for] == [("ant", 1.0)]
    assert [(pair.first, pair.second, pair.images) for pair in table.pairs] == [("ant", "dog", 1)]


def test_a_class_of_test_images_alone_is_all_wrong_and_one_of_training_images_alone_is_not_judged() -> None:
    table = class_report(NAMES, unit(10, 5, 4), torch.tensor([0, 1] * 5), unit(3, 5, 5), torch.tensor([0, 2, UNKNOWN]))
    ant, bee, cat = table.rows
    assert (cat.train, cat.test, cat.accuracy, cat.purity) == (0, 1, 0.0, 0.0)
    assert (bee.train, bee.evaluated, bee.accuracy) == (5, 0, None)
    assert ant.evaluated == 1


def test_test_images_without_classes_are_as_good_as_none() -> None:
    train, label = unit(30, 5, 6), labels_of(30, 7)
    nothing = torch.full((4,), UNKNOWN)
    assert class_report(NAMES, train, label, unit(4, 5, 8), nothing) == class_report(NAMES, train, label)


@pytest.mark.parametrize("label", [[], [UNKNOWN, UNKNOWN], [UNKNOWN, 2]])
def test_too_few_images_to_have_neighbours_are_refused(label: list[int]) -> None:
    with pytest.raises(BadInput, match="too few to have neighbours"):
        class_report(NAMES, unit(len(label), 5, 9), torch.tensor(label, dtype=torch.int64))
