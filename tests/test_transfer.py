"""The transfer suite: every count of the table, splits that share no image, test labels that decide nothing."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import write_photos
from PIL import Image
from torch import Tensor, nn

from cmsf.data import open_source
from cmsf.data.labels import Labels
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.transfer import evaluate_transfer, make_tuner, read_suite
from cmsf.evaluation.transfer.datasets import (
    PAPER,
    DataSplits,
    SplitRule,
    paper_suite,
    part_masks,
    prepare,
    split_images,
)
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import redirect_progress

CALTECH = [870] + [31] * 8 + [56] * 8 + [80] * 84  # 101 classes; sizes made up but for their sum
STAND_INS: dict[str, dict[str, list[int]]] = {
    "food101": {"train": [750] * 101, "test": [250] * 101},
    "cifar10": {"train": [5000] * 10, "test": [1000] * 10},
    "cifar100": {"train": [500] * 100, "test": [100] * 100},
    "sun397": {"train": [50] * 397, "test": [50] * 397},
    # Sizes chosen so that a fifth of each, rounded, makes the table's 1,635.
    "cars": {"train": [41] * 103 + [40] * 26 + [43] * 67, "test": [41] * 195 + [46]},
    "aircraft": {
        "train": [33] * 66 + [34] * 34,
        "val": [34] * 33 + [33] * 67,
        "test": [33] * 67 + [34] * 33,
    },
    "dtd": {"train": [40] * 47, "val": [40] * 47, "test": [40] * 47},
    "pets": {"train": [100] * 17 + [99] * 20, "test": [99] * 31 + [100] * 6},
    "flowers102": {"train": [10] * 102, "val": [10] * 102, "test": [60] * 101 + [89]},
}


def pool(parts: dict[str, list[int]]) -> tuple[dict[str, Tensor], Labels]:
    """Images of so many classes and parts, none of them there."""
    sizes = torch.tensor([size for counts in parts.values() for size in counts])
    classes = torch.tensor([number for counts in parts.values() for number in range(len(counts))])
    number = classes.repeat_interleave(sizes)
    names = tuple(str(i) for i in range(int(number.max()) + 1))
    return part_masks({part: sum(counts) for part, counts in parts.items()}), Labels(number, names)


def disjoint(division: DataSplits) -> bool:
    together = torch.cat([division.train, division.val, division.test])
    return len(together.unique()) == len(together)


@pytest.mark.parametrize("name", STAND_INS)
def test_every_count_is_that_of_the_papers_table(name: str) -> None:
    wanted = PAPER[name]
    provided, labels = pool(STAND_INS[name])
    division = split_images(name, provided, labels, wanted.rule, seed=0)
    assert division.counts == wanted.counts
    assert wanted.differences(division.counts, len(labels.names)) == []
    assert disjoint(division)
    assert bool(provided["test"][division.test].all())
    assert division.notes == ()


def test_aircrafts_and_cars_fifth_is_rounded_within_each_class() -> None:
    for name, sizes in (("cars", {40: 8, 41: 8, 43: 9}), ("aircraft", {66: 13, 67: 13, 68: 14})):
        provided, labels = pool(STAND_INS[name])
        division = split_images(name, provided, labels, PAPER[name].rule, seed=0)
        learned = labels.number[~provided["test"]].bincount()
        for count, val in zip(learned.tolist(), labels.number[division.val].bincount().tolist(), strict=True):
            assert val == sizes[count]


@pytest.mark.parametrize("background", [False, True])
def test_caltech_has_25_and_5_of_each_class_and_the_rest_to_test(background: bool) -> None:
    sizes = [*CALTECH, 467] if background else CALTECH
    sizes = [*sizes[:-1], sizes[-1] + (9144 if background else 8677) - sum(sizes)]
    provided, labels = pool({"train": sizes})
    division = split_images("caltech101", provided, labels, PAPER["caltech101"].rule, seed=0)
    assert division.counts == ((2550, 510, 6084) if background else (2525, 505, 5647))
    assert disjoint(division)
    (said,) = PAPER["caltech101"].differences(division.counts, len(labels.names))
    # The table has the counts of 102 classes, and 101 classes.
    assert said.startswith("102 classes; the paper's table has 101" if background else "2525 / 505 / 5647 images")


def test_the_measures_are_the_tables() -> None:
    assert {name for name, known in PAPER.items() if known.per_class} == {
        "aircraft",
        "pets",
        "caltech101",
        "flowers102",
    }
    assert len(PAPER) == 10


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    provided, labels = pool(STAND_INS["pets"])
    first, again, other = (split_images("pets", provided, labels, SplitRule(val=20), seed) for seed in (0, 0, 1))
    assert torch.equal(first.val, again.val)
    assert not torch.equal(first.val, other.val)
    assert torch.equal(first.test, other.test)


def test_sets_without_splits_or_val_have_a_fifth_of_each_class_drawn_and_say_so() -> None:
    provided, labels = pool({"train": [50] * 4})
    division = split_images("birds", provided, labels, SplitRule(), seed=0)
    assert division.counts == (128, 32, 40)
    assert [note.split(":")[0] for note in division.notes] == ["it has no images in test", "it has no images in val"]
    provided, labels = pool({"train": [50] * 4, "val": [7] * 4, "test": [9] * 4})
    division = split_images("birds", provided, labels, SplitRule(), seed=0)
    assert (division.counts, division.notes) == ((200, 28, 36), ())


def test_images_without_a_label_are_in_no_split() -> None:
    provided, labels = pool({"train": [10, 10], "val": [5, 5], "test": [5, 5]})
    labels = labels.keep(torch.arange(40) % 2 == 0)
    assert sum(split_images("birds", provided, labels, SplitRule(), seed=0).counts) == 20
    with pytest.raises(BadInput, match="birds has no labelled images left for test"):
        split_images("birds", provided, labels.keep(~provided["test"]), SplitRule(), seed=0)


def write_sun(root: Path, lists: bool) -> Path:
    """Two classes of 110 images in the folders of SUN397, with the lists of its first partition or without."""
    listed: dict[str, list[str]] = {"Training_01.txt": [], "Testing_01.txt": []}
    for place in ("a/abbey", "a/apartment_building/outdoor"):
        folder = root / "SUN397" / place
        folder.mkdir(parents=True)
        for i in range(110):
            Image.fromarray(np.full((8, 8, 3), i, dtype=np.uint8)).save(folder / f"sun_{i:03d}.png")
            if i < 100:
                listed["Training_01.txt" if i % 2 else "Testing_01.txt"].append(f"/{place}/sun_{i:03d}.png")
    for name, lines in listed.items() if lists else ():
        (root / "SUN397" / name).write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("lists", [True, False])
def test_sun_is_divided_by_its_lists_or_drawn_and_said(lists: bool, tmp_path: Path) -> None:
    root = write_sun(tmp_path, lists)
    for source in (root, root / "SUN397"):  # as torchvision has it, and the folder itself
        wanted = replace(PAPER["sun397"], source=str(source))
        prepared = prepare(wanted, open_source(source), seed=0)
        assert prepared.labels.names == ("abbey", "apartment_building/outdoor")
        division, paths = prepared.splits, prepared.parts["train"].images.paths
        assert division.counts == (80, 20, 100)
        assert torch.cat([division.val, division.train]).unique().numel() == 100
        even = [int(Path(paths[i]).stem[4:]) % 2 == 0 for i in division.test.tolist()]
        assert all(even) is lists
        assert any("the splits were drawn" in note for note in prepared.notes) is not lists
        assert "2 classes; the paper's table has 397" in prepared.notes


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    for split, count in (("train", 12), ("val", 6), ("test", 6)):
        write_photos(tmp_path / "birds" / split, count, 3, side=16)
    return tmp_path / "birds"


def suite_file(folder: Path, text: str) -> Path:
    file = folder / "suite.yaml"
    file.write_text(text)
    return file


def test_a_folder_joins_the_suite_in_one_line_and_the_papers_names_bring_their_rules(birds: Path) -> None:
    file = suite_file(
        birds.parent,
        "birds: birds\npets: /photos/pets\nflowers: {data: 'torchvision:Flowers102', like: flowers102}\n"
        "textures: {data: dtd, train: 40, val: 40, measure: mean per class}\n",
    )
    found, pets, flowers, textures = read_suite(file)
    assert (found.name, found.source, found.rule, found.per_class) == ("birds", str(birds), SplitRule(), False)
    assert pets == replace(PAPER["pets"], source="/photos/pets")
    assert (flowers.source, flowers.per_class, flowers.counts) == ("torchvision:Flowers102", True, (1020, 1020, 6149))
    assert (textures.rule, textures.per_class, textures.counts) == (SplitRule(train=40, val=40), True, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no data sets"),
        ("- birds", "names no data sets"),
        ("birds: 3", "birds in .* needs a source of images"),
        ("birds: {dat: x}", "needs a source"),
        ("birds: {data: x, measur: top-1}", "did you mean 'measure'|did you mean measure"),
        ("birds: {data: x, like: pest}", "did you mean 'pets'|did you mean pets"),
        ("birds: {data: x, val: 1.5}", "expected a number of images a class, or a share below 1"),
        ("birds: {data: x, train: 0.5}", "expected a number of images a class"),
        ("birds: {data: x, measure: f1}", "use top-1 or mean per class"),
        ("birds: [", "is not valid YAML"),
        ("birds: 2024-13-45", "is not valid YAML"),
        ("birds: ''", "needs a source of images"),
        ("birds: {data: x, measure: [top-1]}", "use top-1 or mean per class"),
        ("birds: {data: x, test: 5}", "has test: 5 images a class, and needs train and val too"),
        ("birds: {data: x, train: 5}", "has train: 5 images a class, and needs val"),
        ("birds: x\nbirds: y", "has 'birds' twice"),
        ("mean: x\nbirds: y", "'mean' for a name"),
    ],
)
def test_a_mistake_in_the_suite_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        read_suite(suite_file(tmp_path, text))


def test_without_a_suite_and_without_the_papers_sets_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMSF_DATA", str(tmp_path))
    (tmp_path / "torchvision").mkdir()
    with pytest.raises(BadInput, match="none of the paper's ten data sets is at"):
        paper_suite(print)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_names_that_yaml_would_read_as_something_else_stay_names(tmp_path: Path) -> None:
    assert [one.name for one in read_suite(suite_file(tmp_path, "no: a\n1: b\n"))] == ["no", "1"]


def test_a_mistake_in_the_last_set_shows_before_any_work(birds: Path, tmp_path: Path) -> None:
    suite = read_suite(suite_file(birds.parent, "birds: birds\nother: missing\n"))
    network = nn.Flatten()
    network.register_forward_hook(lambda *_: pytest.fail("images were looked at"))
    with pytest.raises(BadInput, match=r"data set other: no such file or folder: .*missing"):
        evaluate_transfer(
            FeatureExtractor(network, Preprocessing(16)),
            suite,
            lambda problem, name, _: pytest.fail("searched"),
            0,
            1,
            print,
        )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())


def test_a_suite_is_searched_and_judged_and_test_labels_decide_nothing(
    birds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cmsf.evaluation.transfer.trial._ITERATIONS", (1, 32))
    said: list[str] = []
    suite = read_suite(suite_file(birds.parent, "birds: birds\nsame: {data: birds, measure: mean per class}\n"))
    tuner = make_tuner(tmp_path / "kept", trials=6, processes=1, seed=0, storage=None, ray=False)
    features = FeatureExtractor(network(), Preprocessing(16))
    told: list[str] = []
    with redirect_progress(told.append):
        result = evaluate_transfer(features, suite, tuner, 0, 6, said.append)
    assert result.accuracy["birds"] > 50
    assert "transfer 7 of 12, same, 2 of 2" in told
    assert re.fullmatch(r"transfer 12 of 12, same, 2 of 2, best \d+\.\d\d %", told[-2])
    assert any(line.startswith("same, 2 of 2: features 1 of ") for line in told)
    assert result.accuracy["mean"] == pytest.approx((result.accuracy["birds"] + result.accuracy["same"]) / 2)
    about = result.protocol["data sets"]["birds"]
    assert about["images"] == {"train": 36, "val": 18, "test": 18}
    assert about["trials"]["complete"] + about["trials"]["pruned"] == 6

    # Other test labels: the same settings, another figure.
    one, two = (birds / "test" / f"class {number}" for number in (0, 1))
    one.rename(birds / "aside")
    two.rename(one)
    (birds / "aside").rename(two)
    tuner = make_tuner(tmp_path / "anew", trials=6, processes=1, seed=0, storage=None, ray=False)
    other = evaluate_transfer(features, suite[:1], tuner, 0, 6, said.append)
    assert other.protocol["data sets"]["birds"]["settings"] == about["settings"]
    assert other.accuracy["birds"] != result.accuracy["birds"]
    report = result.report()["measures"]
    assert report["same"]["quoted"] == "mean per class"
    assert report["mean"]["quoted"] == "mean of 2 sets"
