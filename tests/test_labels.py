"""Fewer, noisier and coarser labels; and that what is hidden from training stays hidden."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import images_of_classes, write_npz
from PIL import Image
from runs import metrics
from torch import Tensor

import cmsf
from cmsf.data import Dataset, open_source
from cmsf.data.imagenet import coarse_groups, imagenet_100, simclr_files
from cmsf.data.labels import (
    Labels,
    add_noise,
    coarsen,
    modify_labels,
    number_of_each_class,
    read_groups,
    share_of_each_class,
)
from cmsf.data.prepare import load_dataset as load_images
from cmsf.data.sources.table import write_csv
from cmsf.evaluation.splits import describe_votes
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

FISH = "n01443537"  # goldfish


def labels(*counts: int, unknown: int = 0, seed: int = 0) -> Labels:
    """So many images of each class, in a random order."""
    numbers = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    numbers = torch.cat([numbers, torch.full((unknown,), UNKNOWN)])
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return Labels(numbers[order], tuple(f"class {number}" for number in range(len(counts))))


def kept_are_as_before(before: Labels, after: Labels) -> bool:
    return bool((after.number == before.number)[after.known].all()) and after.names == before.names


# Fewer


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.999, 1.0])
def test_a_share_is_taken_of_each_class(share: float) -> None:
    before = labels(1000, 500, 37, 1, unknown=100)
    after = share_of_each_class(before, share, seed=3)
    wanted = [max(1, int(share * count + 0.5)) for count in (1000, 500, 37, 1)]
    assert after.counts().tolist() == wanted
    assert kept_are_as_before(before, after)


@pytest.mark.parametrize("number", [1, 4, 37, 10_000])
def test_so_many_of_each_class_are_taken_and_never_more_than_there_are(number: int) -> None:
    before = labels(1000, 37, 3, 0, unknown=50)
    after = number_of_each_class(before, number, seed=3)
    assert after.counts().tolist() == [min(number, count) for count in (1000, 37, 3, 0)]
    assert kept_are_as_before(before, after)


def test_which_labels_are_kept_is_decided_by_the_seed_alone() -> None:
    before = labels(200, 200, 200)
    for choose in (
        lambda seed: share_of_each_class(before, 0.1, seed),
        lambda seed: number_of_each_class(before, 20, seed),
    ):
        assert torch.equal(choose(5).number, choose(5).number)
        assert not torch.equal(choose(5).number, choose(6).number)
    assert torch.equal(share_of_each_class(before, 0.1, 5).number, number_of_each_class(before, 20, 5).number)


def test_a_larger_share_holds_the_smaller_one() -> None:
    before = labels(300, 200, 100)
    small, large = (share_of_each_class(before, share, seed=1) for share in (0.1, 0.3))
    assert (large.known | ~small.known).all()


def test_every_image_has_the_same_chance_to_be_kept() -> None:
    before = labels(40)
    times = sum(number_of_each_class(before, 10, seed).known.int() for seed in range(400))
    expected = torch.tensor(100.0)
    assert ((times - expected) ** 2 / expected).sum() < 39 + 5 * (2 * 39) ** 0.5


# Noisier


@pytest.mark.parametrize("rate", [0.05, 0.25, 0.5, 1.0])
def test_noise_replaces_labels_at_its_rate(rate: float) -> None:
    before = labels(*[2000] * 10)
    replaced = int((add_noise(before, rate, seed=0).number != before.number).sum())
    assert abs(replaced - 20_000 * rate) <= 4 * (20_000 * rate * (1 - rate)) ** 0.5


def test_noise_never_gives_the_same_class_and_leaves_unlabelled_images_alone() -> None:
    before = labels(500, 400, 300, unknown=200)
    after = add_noise(before, 1.0, seed=7)
    assert (after.number != before.number)[before.known].all()
    assert torch.equal(after.known, before.known)
    assert after.number.max() < 3
    assert after.names == before.names


def test_a_replaced_label_is_any_other_class_alike() -> None:
    before = labels(*[5000] * 8)
    after = add_noise(before, 0.5, seed=1)
    table = torch.zeros(8, 8).index_put_((before.number, after.number), torch.ones(()), accumulate=True)
    others = table[~torch.eye(8, dtype=torch.bool)].view(8, 7)
    expected = others.sum(1, keepdim=True) / 7
    freedom = 8 * 6
    assert ((others - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_noise_of_two_classes_swaps_them() -> None:
    before = labels(50, 50)
    assert torch.equal(add_noise(before, 1.0, seed=0).number, 1 - before.number)


def test_noise_depends_on_the_seed_and_the_image_and_on_nothing_else() -> None:
    before = labels(*[300] * 5)
    after = add_noise(before, 0.4, seed=2)
    assert torch.equal(after.number, add_noise(before, 0.4, seed=2).number)
    assert not torch.equal(after.number, add_noise(before, 0.4, seed=3).number)
    beginning = Labels(before.number[:700], before.names)
    assert torch.equal(add_noise(beginning, 0.4, seed=2).number, after.number[:700])
    some = before.keep(torch.arange(len(before)) % 3 == 0)
    assert torch.equal(add_noise(some, 0.4, seed=2).number[some.known], after.number[some.known])


def test_noise_is_not_the_choice_of_what_is_kept() -> None:
    """Were both the same draw, the labels that are kept would be wrong first."""
    before = labels(*[2000] * 5)
    kept = share_of_each_class(before, 0.1, seed=0)
    wrong = (add_noise(kept, 0.3, seed=0).number != kept.number)[kept.known].float().mean()
    assert abs(wrong - 0.3) < 4 * (0.3 * 0.7 / 1000) ** 0.5


def test_noise_needs_two_classes() -> None:
    with pytest.raises(BadInput, match="label noise needs two classes or more, and there are 1"):
        add_noise(labels(10), 0.1, seed=0)


# Coarser


def write_mapping(file: Path, **groups: str) -> Path:
    write_csv(file, ("class", "group"), [(name.replace("_", " "), group) for name, group in groups.items()])
    return file


def test_classes_are_joined_into_groups_by_a_file(tmp_path: Path) -> None:
    file = write_mapping(tmp_path / "map.csv", class_0="plant", class_1="animal", class_2="plant", class_9="stone")
    before = labels(5, 4, 3, unknown=2)
    after = coarsen(before, read_groups(str(file)), "map.csv")
    assert after.names == ("animal", "plant")
    assert after.counts().tolist() == [4, 8]
    assert torch.equal(after.known, before.known)
    group = {"class 0": "plant", "class 1": "animal", "class 2": "plant", None: None}
    assert after.to_names() == [group[name] for name in before.to_names()]


def test_a_class_without_a_group_is_named(tmp_path: Path) -> None:
    file = write_mapping(tmp_path / "map.csv", class_0="plant")
    with pytest.raises(BadInput, match=r"has no group for 2 of 3 classes \(the first is 'class 1'\)"):
        modify_labels(labels(5, 4, 3), coarse=str(file))
    after = modify_labels(labels(5, 0, 0), coarse=str(file))  # what has no images needs no group
    assert after.names == ("plant",)


def test_wordnet_joins_the_thousand_classes_into_93_groups() -> None:
    groups = coarse_groups()
    assert len(groups) == 1000
    assert len(set(groups.values())) == 93
    assert all(name[0] == "n" and name[1:].isdecimal() and len(name) == 9 for name in groups)
    assert groups[FISH] == groups["n01440764"]  # goldfish and tench
    assert groups[FISH] != groups["n04285008"]  # and a sports car
    everything = Labels.from_names(sorted(groups))
    assert len(modify_labels(everything, coarse="wordnet").names) == 93


def test_wordnet_serves_folders_that_are_laid_out_like_tiny_imagenet(tmp_path: Path) -> None:
    wnids = [FISH, "n01440764", "n04285008", "n02124075"]
    for place, wnid in enumerate(wnids):
        for i in range(5):
            file = tmp_path / "tiny" / "train" / wnid / "images" / f"{wnid}_{i}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (50 * place, i, 0)).save(file)
    (tmp_path / "tiny" / "val" / "images").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(tmp_path / "tiny" / "val" / "images" / "val_0.JPEG")
    data = load_dataset(tmp_path / "tiny", coarse_labels="wordnet")
    assert data.classes == tuple(sorted(wnids))
    assert data.train.truth.bincount().tolist() == [5] * 4
    assert len(data.label_names) == 3
    groups = coarse_groups()
    assert names(data.train.label, data.label_names) == [groups[path.split("/")[1]] for path in data.train.paths]


def test_wordnet_names_a_class_that_it_does_not_know() -> None:
    with pytest.raises(BadInput, match=r"wordnet has no group for 1 of 2 classes \(the first is 'my dog'\)"):
        modify_labels(Labels.from_names([FISH, "my dog"]), coarse="wordnet")


def test_imagenet_100_has_a_hundred_of_the_thousand_classes() -> None:
    assert len(imagenet_100()) == 100
    assert imagenet_100() < coarse_groups().keys()


def test_simclr_s_lists_have_as_many_files_as_they_should() -> None:
    one, ten = simclr_files(1), simclr_files(10)
    assert (len(one), len(ten)) == (12_811, 128_116)
    assert one < ten
    classes = coarse_groups().keys()
    assert {file.split("_")[0] for file in one} == {file.split("_")[0] for file in ten} == classes
    assert all(file.endswith(".JPEG") and file[10:-5].isdecimal() for file in one)


def test_some_classes_alone_are_then_all_there_are() -> None:
    before = labels(5, 4, 3)
    after = before.keep_classes({"class 0", "class 2", "another"}, "list")
    assert after.names == ("class 0", "class 2")
    assert after.counts().tolist() == [5, 3]
    with pytest.raises(BadInput, match="none of the 1 classes of list is among class 0, class 1"):
        before.keep_classes({"another"}, "list")


# In a recipe


def names(numbers: Tensor, called: tuple[str, ...]) -> list[str | None]:
    return Labels(numbers, called).to_names()


def load_dataset(source: Path, labels: Path | None = None, **settings) -> Dataset:
    return load_images(open_source(source), Recipe(**settings), 16, labels=labels)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Forty training images in each of four classes, and test images apart."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (200, 8, 8), dtype=np.uint8)
    train = generator.permutation(np.repeat(np.arange(4), 40))
    arrays = {"x_train": images[:160], "y_train": train, "x_test": images[160:], "y_test": np.repeat(np.arange(4), 10)}
    np.savez(tmp_path / "arrays.npz", **arrays, classes=np.array(["cat", "dog", "oak", "elm"]))
    return tmp_path / "arrays.npz"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return write_mapping(tmp_path / "groups.csv", cat="animal", dog="animal", oak="plant", elm="plant")


def test_the_recipe_s_options_change_labels_and_leave_the_truth(arrays: Path, groups: Path) -> None:
    plain = load_dataset(arrays)
    assert torch.equal(plain.train.label, plain.train.truth)
    options = [
        ({"label_share": 0.25}, 40, 0),
        ({"labels_per_class": 3}, 12, 0),
        ({"label_share": 0.25, "labels_per_class": 3}, 12, 0),
        ({"coarse_labels": str(groups)}, 160, 0),
        ({"coarse_labels": str(groups), "labels_per_class": 3}, 6, 0),
        ({"label_noise": 1.0}, 160, 160),
        ({"label_noise": 1.0, "label_share": 0.25}, 40, 40),
    ]
    for settings, labelled, wrong in options:
        data = load_dataset(arrays, **settings)
        assert torch.equal(data.train.truth, plain.train.truth)
        assert torch.equal(data.test.truth, plain.test.truth)
        assert (data.test.label == UNKNOWN).all()
        assert data.classes == plain.classes
        assert len(data.train.labelled) == labelled
        if "coarse_labels" in settings:
            assert data.label_names == ("animal", "plant")
        else:
            assert int((data.train.label != data.train.truth)[data.train.labelled].sum()) == wrong


def test_labels_are_coarsened_then_chosen_then_made_noisy(arrays: Path, groups: Path) -> None:
    settings = {"coarse_labels": str(groups), "label_share": 0.1, "label_noise": 0.3, "seed": 11}
    data = load_dataset(arrays, **settings)
    step = coarsen(Labels.from_names(names(data.train.truth, data.classes), data.classes), read_groups(str(groups)), "")
    step = share_of_each_class(step, 0.1, seed=11)
    assert step.counts().tolist() == [8, 8]  # a tenth of each group
    assert torch.equal(data.train.label, add_noise(step, 0.3, seed=11).number)
    assert 0 < int((data.train.label != step.number).sum()) < 16


def test_the_options_work_on_listed_labels_too(arrays: Path, groups: Path, tmp_path: Path) -> None:
    rows = [(f"x_train/{i}", ("cat", "elm")[i % 2]) for i in range(100)]
    write_csv(tmp_path / "list.csv", ("path", "label"), rows)
    data = load_dataset(arrays, tmp_path / "list.csv", coarse_labels=str(groups), labels_per_class=7)
    assert data.label_names == ("animal", "plant")
    assert data.train.label[data.train.labelled].bincount().tolist() == [7, 7]
    assert (data.train.labelled < 100).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_training_gets_its_number_of_labels_where_a_tenth_is_held_out(seed: int, tmp_path: Path) -> None:
    images, label = images_of_classes(30, 10, 8)
    np.savez(tmp_path / "a.npz", x=images, y=label)
    data = load_dataset(tmp_path / "a.npz", labels_per_class=2, seed=seed)
    assert data.train.label[data.train.labelled].bincount(minlength=10).tolist() == [2] * 10


# What is hidden stays hidden


def losses(run: cmsf.Run) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name.startswith("loss")} for line in metrics(run)]


def purities(run: cmsf.Run) -> list[float]:
    return [line["purity_constrained"] for line in metrics(run)]


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Tiny networks only wait for a second one, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_a_hidden_label_cannot_reach_a_loss(tmp_path: Path) -> None:
    """Other classes beneath the same list change what is reported, and not one bit of what is learned."""
    images, label = images_of_classes(16, 4, 12)
    generator = np.random.default_rng(5)
    np.savez(tmp_path / "true.npz", x=images, y=label)
    np.savez(tmp_path / "seven.npz", x=images, y=generator.integers(0, 7, len(label)))
    for name, given in (("list", label), ("other", (label + np.arange(len(label)) % 2) % 4)):
        rows = [(str(i), "pqrs"[number]) for i, number in enumerate(given) if i % 3]
        write_csv(tmp_path / f"{name}.csv", ("index", "label"), rows)
    fast = {"epochs": 1, "batch_size": 16, "log_every": 1, "projection_hidden": 16, "projection_dim": 8}

    def train(source: str, listed: str) -> cmsf.Run:
        out = tmp_path / f"{source}-{listed}"
        data, given = tmp_path / f"{source}.npz", tmp_path / f"{listed}.csv"
        return cmsf.train("cmsf-sup-small", data, out, labels=given, device="cpu", quiet=True, **fast)

    first, second, other = train("true", "list"), train("seven", "list"), train("true", "other")
    assert len(losses(first)) == 3 + 1  # steps, and the epoch
    assert losses(second) == losses(first)
    assert second.folder.backbone_file.read_bytes() == first.folder.backbone_file.read_bytes()
    assert purities(second) != purities(first)
    assert losses(other) != losses(first)
    assert other.folder.backbone_file.read_bytes() != first.folder.backbone_file.read_bytes()


def test_coarse_labels_work_where_a_tenth_is_held_out_and_test_images_teach_nothing(tmp_path: Path) -> None:
    """The held-out images keep their fine truth, and have no label that a coarse name would be looked up for."""
    data = write_npz(tmp_path / "bars.npz")
    (tmp_path / "groups.csv").write_text("class,group\n0,left\n1,left\n2,right\n3,right\n")
    run = cmsf.train(
        "cmsf-sup-small",
        data,
        tmp_path / "run",
        quiet=True,
        epochs=1,
        projection_hidden=16,
        projection_dim=8,
        coarse_labels=str(tmp_path / "groups.csv"),
    )
    rows = pq.read_table(run.folder.data_file).to_pylist()
    assert {row["label"] for row in rows if row["split"] == "train"} == {"left", "right"}
    assert {row["label"] for row in rows if row["split"] == "test"} == {None}
    assert {row["truth"] for row in rows} == {"0", "1", "2", "3"}


def test_how_many_labels_the_noise_replaced_is_said(tmp_path: Path) -> None:
    source = open_source(write_npz(tmp_path / "bars.npz"))
    data = load_images(source, Recipe(label_noise=0.25), 16)
    replaced = int((data.train.label != data.train.truth).sum())
    assert f"{replaced} of 144 labels were replaced by noise ({100 * replaced / 144:.2f} %)" in data.notes


def test_noise_stays_among_the_classes_there_are_to_train_on() -> None:
    names = ["a"] * 200 + ["c"] * 200
    labels = add_noise(Labels.from_names(names, ("a", "b", "c", "d")), 0.5, seed=0)
    assert set(labels.to_names()) == {"a", "c"}
    assert 150 < sum(one != other for one, other in zip(names, labels.to_names(), strict=True)) < 250


# What is voted with


def test_what_knn_votes_with_is_said_where_training_has_other_labels(tmp_path: Path) -> None:
    write_csv(tmp_path / "groups.csv", ("class", "group"), [(str(number), "ab"[number // 2]) for number in range(4)])
    write_csv(tmp_path / "named.csv", ("path", "label"), [(f"x/{i}", f"angle {i % 2}") for i in range(160)])
    source = open_source(write_npz(tmp_path / "bars.npz"))

    def said(listed: Path | None = None, **settings: Any) -> str:
        return describe_votes(load_images(source, Recipe(**settings), 16, labels=listed))

    start = "k-NN in the log votes with the true labels of all 144 training images, of which training has "
    assert said() == ""
    assert said(labels_per_class=2) == f"{start}8"
    assert said(coarse_labels=str(tmp_path / "groups.csv")) == f"{start}144, joined into 2 groups"
    assert said(tmp_path / "named.csv") == f"{start}0, and 144 labels that differ"
    right, wrong = map(
        int, re.fullmatch(rf"{start}(\d+), and (\d+) labels that differ", said(label_noise=0.5)).groups()
    )
    assert right + wrong == 144
    assert 50 < wrong < 94


def test_nothing_is_said_of_votes_where_there_are_none(tmp_path: Path) -> None:
    source = open_source(write_npz(tmp_path / "bars.npz", labelled=False))
    assert describe_votes(load_images(source, Recipe(), 16)) == ""
