"""Few labels: which images they are, and what the two classifiers do with them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import write_npz
from test_linear import separable
from torch import nn

from cmsf.data import Dataset, load_dataset, open_source
from cmsf.data.sources.table import read_label_list
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, LabelSubset, evaluate_few_labels, seeded_subsets, subset_from_list
from cmsf.evaluation.finetune import FineTuneSettings, fine_tune
from cmsf.evaluation.predict import predict_scores
from cmsf.recipes.recipe import Recipe
from cmsf.utils.errors import BadInput

NAMES = ("a", "b", "c")


def levels(train: int = 300) -> Dataset:
    return Dataset("levels", NAMES, NAMES, separable(train, 0), separable(90, 1), "90 images")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()


def test_shares_are_of_each_class_and_depend_on_the_seed_alone() -> None:
    one, ten = seeded_subsets(levels(), seed=3)
    assert one.label.bincount().tolist() == [1, 1, 1]
    assert ten.label.bincount().tolist() == [10, 10, 10]
    assert torch.equal(ten.label, levels().train.truth[ten.index])
    assert torch.equal(ten.index, seeded_subsets(levels(), seed=3)[1].index)
    assert not torch.equal(ten.index, seeded_subsets(levels(), seed=4)[1].index)


def test_labels_beyond_the_share_cannot_reach_the_classifiers() -> None:
    data = levels()
    (_, ten) = seeded_subsets(data, seed=0)
    scrambled = data.train.truth.roll(1)
    scrambled[ten.index] = data.train.truth[ten.index]
    other = replace(data, train=replace(data.train, truth=scrambled))
    first, second = (
        evaluate_few_labels(FeatureExtractor(network(), Preprocessing(12)), one, [ten], 0) for one in (data, other)
    )
    assert first.accuracy == second.accuracy
    assert first.accuracy["10 % linear"] > 60


def test_fine_tuning_moves_a_copy_of_the_whole_network_and_repeats() -> None:
    data, backbone = levels(), network()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    features = FeatureExtractor(backbone, Preprocessing(12))
    first, second = (fine_tune(features, data.train, data.train.truth, 8, 3, seed=1) for _ in range(2))
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name])
    moved = [name for name, value in first[0].state_dict().items() if not torch.equal(value, before[name])]
    assert set(moved) == set(before)
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    right = predict_scores(first, data.test, features).argmax(1) == data.test.truth
    assert right.double().mean() > 0.8


@pytest.mark.parametrize(
    ("count", "batch", "epochs"), [(128_116, 256, 20), (2048, 256, 63), (1000, 125, 63), (100, 16, 84), (5, 5, 500)]
)
def test_the_papers_course_and_more_epochs_where_images_are_few(count: int, batch: int, epochs: int) -> None:
    assert FineTuneSettings().batch_and_epochs(count) == (batch, epochs)


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "bars.npz")


def from_list(file: Path, bars: Path) -> LabelSubset:
    source = open_source(bars)
    names = read_label_list(source, file)["train"]
    data = load_dataset(source, Recipe(seed=0), 16)
    return subset_from_list(file, dict(zip(source.train.images.paths, names, strict=True)), data)


def test_a_list_says_which_images_are_labelled_and_how(bars: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    file.write_text("index,label\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    few = from_list(file, bars)
    train = load_dataset(open_source(bars), Recipe(seed=0), 16).train
    assert few.name == "some"
    assert 10 < len(few.index) <= 20  # a tenth of all is held out
    for place, label in zip(few.index.tolist(), few.label.tolist(), strict=True):
        number = int(train.paths[place].split("/")[-1])
        assert label == number % 2


def test_a_list_of_other_classes_or_of_one_class_is_refused(bars: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    file.write_text("index,label\n0,cat\n1,dog\n")
    with pytest.raises(BadInput, match="'cat', which is not a class of bars"):
        from_list(file, bars)
    one = LabelSubset("one", "", torch.tensor([0, 3]), torch.tensor([0, 0]))
    with pytest.raises(BadInput, match="labels of 1 class"):
        evaluate_few_labels(FeatureExtractor(network(), Preprocessing(12)), levels(), [one], 0)
