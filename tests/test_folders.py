"""Folders as people have them: names in any script, links, splits, files that are broken or no images."""

import os
import random
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch
from helpers import write_photos
from PIL import Image

import cmsf
from cmsf.cli import main
from cmsf.data import Dataset, Images, Source, Unreadable, open_source
from cmsf.data.images import FileImages, ResizedImages
from cmsf.data.prepare import load_dataset as load_images
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

FAST = {"epochs": 1, "batch_size": 16, "projection_hidden": 16, "projection_dim": 8}


def load_dataset(source: Source | Path, size: int = 64, val: Source | None = None, **settings) -> Dataset:
    opened = open_source(source) if isinstance(source, Path) else source
    return load_images(opened, Recipe(**settings), size, val=val)


def put(place: Path, shade: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    """A small image, with the folders above it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(place, format="PNG")
    return place


def put_classes(folder: Path, *names: str, each: int = 3) -> Path:
    for shade, name in enumerate(names):
        for i in range(each):
            put(folder / name / f"{i}.png", 100 * shade + i)
    return folder


def names_of(folder: Path) -> list[str | None]:
    return list(open_source(folder).train.names)


def damage(*files: Path) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[:300])


# Names


NAMES = ["猫", "قطة", "кошка", "🐈‍⬛", "a cat", 'the "cat"', "l'chat", "$x^2$", "cat, black", "100%", "cat;tab\t", "#1"]


def test_class_folders_may_be_called_anything(tmp_path: Path) -> None:
    put_classes(tmp_path, *NAMES, each=2)
    source = open_source(tmp_path)
    assert set(source.classes) == set(NAMES)
    assert [path.split("/")[0] for path in source.train.images.paths] == list(source.train.names)
    data = load_dataset(source, cache="ram")
    assert len(data.train) + len(data.test) == 2 * len(NAMES)


@pytest.mark.parametrize(
    "name", ["写真.png", "صورة.png", "🦊.png", " spaces at both ends .png", "q'u\"o.png", "a,b;c.png"]
)
def test_files_may_be_called_anything(name: str, tmp_path: Path) -> None:
    put(tmp_path / "folder with spaces" / name, 9)
    data = load_dataset(tmp_path)
    assert data.train.paths == [f"folder with spaces/{name}"]
    assert data.train.images[0][:, 0, 0].tolist() == [9, 0, 7]


def test_two_spellings_of_one_letter_are_two_files(tmp_path: Path) -> None:
    for shade, form in enumerate(("NFC", "NFD")):
        put(tmp_path / normalize(form, "é.png"), shade)
    data = load_dataset(tmp_path)
    assert len(data.train) == 2
    assert {int(picture[0, 0, 0]) for picture in data.train.images} == {0, 1}


def test_a_class_is_the_same_however_its_letters_are_composed(tmp_path: Path) -> None:
    """A split that was copied from a Mac spells é as e and an accent."""
    for part, form in (("train", "NFC"), ("val", "NFD")):
        put_classes(tmp_path / part, normalize(form, "café"), normalize(form, "thé"))
    data = load_dataset(tmp_path)
    assert len(data.classes) == 2
    assert data.test.truth.unique().tolist() == data.train.truth.unique().tolist()


def test_a_name_that_is_no_unicode_is_read_or_refused_but_never_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = put_classes(tmp_path / "photos", "cat", "dog", each=20)
    try:
        os.rename(photos / "cat" / "0.png", os.fsencode(photos / "cat") + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes Unicode alone")
    assert main(["labels", str(photos), "--out", str(tmp_path / "list.csv")]) in (0, 2)
    flags = ["--epochs", "1", "--batch-size", "16", "--projection-hidden", "16", "--projection-dim", "8"]
    assert main(["train", "msf-small", "--data", str(photos), "--out", str(tmp_path / "run"), *flags]) in (0, 2)


# What is found


def test_nested_folders_are_walked_and_the_first_is_the_class(tmp_path: Path) -> None:
    put(tmp_path / "cat" / "black" / "2019" / "a.png")
    put(tmp_path / "cat" / "b.png")
    put(tmp_path / "dog" / "small" / "c.png")
    source = open_source(tmp_path)
    assert source.train.images.paths == ["cat/b.png", "cat/black/2019/a.png", "dog/small/c.png"]
    assert source.train.names == ["cat", "cat", "dog"]


def test_suffixes_in_capitals_are_images_too(tmp_path: Path) -> None:
    for name in ("a.JPG", "b.JPEG", "c.Png", "d.TIF"):
        put(tmp_path / name)
    assert len(open_source(tmp_path).train) == 4


def test_hidden_files_and_what_a_mac_leaves_behind_are_ignored(tmp_path: Path) -> None:
    put_classes(tmp_path, "cat", "dog")
    for name in (
        "cat/._0.png",
        ".DS_Store.png",
        "cat/.hidden.png",
        ".cache/x.png",
        "__MACOSX/cat/._0.png",
        ".git/a.png",
    ):
        put(tmp_path / name)
    source = open_source(tmp_path)
    assert (len(source.train), source.classes) == (6, ("cat", "dog"))
    assert source.notes == ()


def test_files_that_are_no_images_are_counted_and_said_by_suffix(tmp_path: Path) -> None:
    put_classes(tmp_path, "cat", "dog")
    others = ["a.txt", "b.TXT", "cat/c.txt", "d.json", "README", "e.mp4", "f.mp4", "g.xml", "h.zip"]
    for name in others:
        (tmp_path / name).write_text("no image")
    (note,) = open_source(tmp_path).notes
    assert note.startswith("9 files are not images and were left alone: 3 .txt, 2 .mp4, ")
    assert note.endswith("…")
    for name in others[3:]:
        (tmp_path / name).unlink()
    (tmp_path / "README").write_text("no image")
    assert open_source(tmp_path).notes == ("4 files are not images and were left alone: 3 .txt, 1 no suffix",)
    assert load_dataset(tmp_path).notes == open_source(tmp_path).notes


def test_a_folder_without_images_says_what_it_has(tmp_path: Path) -> None:
    for name in ("a.txt", "b.mp4"):
        (tmp_path / name).write_text("no image")
    with pytest.raises(BadInput, match=r"no images below .*, 2 other files; cmsf reads .*\.jpg .*\.webp"):
        open_source(tmp_path)


def test_linked_folders_are_followed(tmp_path: Path) -> None:
    put_classes(tmp_path / "elsewhere", "dog")
    put_classes(tmp_path / "photos", "cat")
    (tmp_path / "photos" / "dog").symlink_to(tmp_path / "elsewhere" / "dog", target_is_directory=True)
    (tmp_path / "photos" / "cat" / "linked.png").symlink_to(tmp_path / "elsewhere" / "dog" / "0.png")
    source = open_source(tmp_path / "photos")
    assert source.classes == ("cat", "dog")
    assert source.train.images.paths == [*(f"cat/{name}.png" for name in ("0", "1", "2", "linked")),
                                         *(f"dog/{i}.png" for i in range(3))]  # fmt: skip
    assert len(load_dataset(source).train) + len(load_dataset(source).test) == 7


def test_a_linked_root_is_a_folder_like_any_other(tmp_path: Path) -> None:
    put_classes(tmp_path / "real", "cat", "dog")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    assert open_source(tmp_path / "link").train.images.paths == open_source(tmp_path / "real").train.images.paths


def test_loops_of_links_end_and_no_image_is_there_twice(tmp_path: Path) -> None:
    put_classes(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "cat" / "self").symlink_to(tmp_path / "cat", target_is_directory=True)
    (tmp_path / "dog" / "other").symlink_to(tmp_path / "cat", target_is_directory=True)
    source = open_source(tmp_path)
    assert len(source.train) == 6
    assert len({(tmp_path / path).resolve() for path in source.train.images.paths}) == 6


def test_a_link_to_nowhere_is_a_broken_image(tmp_path: Path) -> None:
    put_classes(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(BadInput, match=r"cannot read 1 image \(cat/gone\.png: no such file\)"):
        load_dataset(tmp_path)


def test_the_order_is_not_the_file_system_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [f"{name}/{i}.png" for name in ("b", "a", "Ä", "猫") for i in range(12)]
    for seed in (0, 1):
        shuffled = random.Random(seed).sample(places, len(places))
        for place in shuffled:
            put(tmp_path / str(seed) / place)
    found = [open_source(tmp_path / str(seed)).train.images.paths for seed in (0, 1)]
    assert found[0] == found[1] == sorted(places)

    walk = os.walk

    def backwards(top, **options):
        for folder, subfolders, files in walk(top, **options):
            subfolders.sort(reverse=True)
            yield folder, subfolders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert open_source(tmp_path / "0").train.images.paths == found[0]


def test_where_a_folder_lies_does_not_change_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("here", "far/away"):
        put_classes(tmp_path / place / "photos", "cat", "dog", each=20)
    first, second = (load_dataset(tmp_path / place / "photos") for place in ("here", "far/away"))
    assert (first.train.paths, first.test.paths) == (second.train.paths, second.test.paths)
    monkeypatch.chdir(tmp_path / "here")
    third = load_dataset(Path("photos"))
    assert (first.name, first.test.paths) == (third.name, third.test.paths)


# Classes and splits


def test_one_folder_alone_is_no_class(tmp_path: Path) -> None:
    put_classes(tmp_path, "everything")
    source = open_source(tmp_path)
    assert source.train.names == [None] * 3
    assert source.classes == ()
    assert source.notes == (f"{tmp_path.name} has one folder alone, everything, so folders are not taken as classes",)


@pytest.mark.parametrize(
    ("folders", "judged"),
    [
        (("train", "val", "test"), "test"),
        (("train", "test"), "test"),
        (("train", "val"), "val"),
        (("trainval", "test"), "test"),
        (("trainval", "val", "test"), "test"),
    ],
)
def test_split_folders_are_splits_and_test_comes_first(folders: tuple[str, ...], judged: str, tmp_path: Path) -> None:
    sizes = {"train": 5, "trainval": 5, "val": 3, "test": 2}
    for folder in folders:
        put_classes(tmp_path / folder, "cat", "dog", each=sizes[folder])
    data = load_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (10, 2 * sizes[judged])
    assert all(path.startswith("train") for path in data.train.paths)
    assert all(path.startswith(f"{judged}/") for path in data.test.paths)
    assert data.test.truth.tolist() == sorted([0, 1] * sizes[judged])
    aside = len(folders) == 3
    assert data.notes == ((f"val with {2 * sizes['val']} images is set aside; test is evaluated on",) if aside else ())


@pytest.mark.parametrize("below", ["", "unknown/"])
def test_an_unlabelled_test_part_leaves_val_to_be_judged_on(below: str, tmp_path: Path) -> None:
    put_classes(tmp_path / "train", "cat", "dog", each=5)
    put_classes(tmp_path / "val", "cat", "dog", each=2)
    for i in range(6):
        put(tmp_path / "test" / f"{below}{i}.png", i)
    data = load_dataset(tmp_path)
    assert data.test_origin == "4 images of val"
    assert "test with 6 images is set aside; val is evaluated on" in data.notes
    assert (data.test.truth != UNKNOWN).all()


def test_train_beside_trainval_is_refused(tmp_path: Path) -> None:
    for folder in ("train", "trainval"):
        put_classes(tmp_path / folder, "cat", "dog")
    with pytest.raises(BadInput, match=r"both train/ and trainval/, which may share images; move one of them away"):
        open_source(tmp_path)


@pytest.mark.parametrize("folders", [("Train", "Test"), ("TRAIN", "VAL"), ("TrainVal", "test")])
def test_split_folders_are_called_so_in_letters_of_any_case(folders: tuple[str, str], tmp_path: Path) -> None:
    for folder, each in zip(folders, (5, 2), strict=True):
        put_classes(tmp_path / folder, "cat", "dog", each=each)
    data = load_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (10, 4)
    assert all(path.startswith(f"{folders[0]}/") for path in data.train.paths)


def test_two_folders_for_training_whose_names_differ_in_case_are_refused(tmp_path: Path) -> None:
    for folder in ("train", "Train"):
        put_classes(tmp_path / folder, "cat", "dog")
    with pytest.raises(BadInput, match=r"both Train/ and train/, which may share images; move one of them away"):
        open_source(tmp_path)


def test_two_folders_of_one_test_split_are_joined_and_said(tmp_path: Path) -> None:
    for folder in ("train", "Test", "test"):
        put_classes(tmp_path / folder, "cat", "dog", each=2)
    source = open_source(tmp_path)
    assert {name: len(split) for name, split in source.splits.items()} == {"train": 4, "test": 8}
    assert source.notes == ("Test and test are both test",)


def test_a_part_of_resized_images_is_resized_too(tmp_path: Path) -> None:
    for i in range(4):
        put(tmp_path / f"{i}.png", i, size=(60, 40))
    images = ResizedImages(FileImages(tmp_path, [f"{i}.png" for i in range(4)]), 20)
    some = images.subset(torch.tensor([3, 1])).subset(torch.tensor([1, 0]))
    assert some.paths == ["1.png", "3.png"]
    for place, i in enumerate((1, 3)):
        assert tuple(some.decode(place, 1000).shape) == (3, 20, 30)
        assert torch.equal(some.decode(place, 1000), images.decode(i, 1000))


def test_unlabelled_splits_have_no_classes(tmp_path: Path) -> None:
    for i in range(4):
        put(tmp_path / "train" / f"{i}.png", i)
    put_classes(tmp_path / "test", "cat", "dog")
    data = load_dataset(tmp_path)
    assert data.classes == ()
    assert data.train.truth.tolist() == [UNKNOWN] * 4


def test_a_training_folder_alone_is_the_source(tmp_path: Path) -> None:
    put_classes(tmp_path / "train", "cat", "dog", each=10)
    data = load_dataset(tmp_path)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.test)) == (18, 2)


def test_another_source_to_test_on_is_united_by_class_names_and_nothing_is_held_out(tmp_path: Path) -> None:
    put_classes(tmp_path / "mine", "cat", "dog", each=10)
    put_classes(tmp_path / "theirs", "dog", "ant", "zebra", each=2)
    data = load_dataset(tmp_path / "mine", val=open_source(tmp_path / "theirs"))
    assert len(data.train) == 20
    assert data.test_origin == "6 images of theirs"
    assert set(data.classes) == {"cat", "dog", "ant", "zebra"}
    for split in (data.train, data.test):
        assert [data.classes[number] for number in split.truth.tolist()] == [path.split("/")[0] for path in split.paths]
    assert data.test.label.tolist() == [UNKNOWN] * 6


def test_another_source_to_test_on_takes_the_place_of_splits_and_that_is_said(tmp_path: Path) -> None:
    put_classes(tmp_path / "mine" / "train", "cat", "dog", each=4)
    put_classes(tmp_path / "mine" / "test", "cat", "dog", each=2)
    put_classes(tmp_path / "theirs" / "train", "cat", "dog", each=5)
    put_classes(tmp_path / "theirs" / "val", "cat", "dog", each=1)
    data = load_dataset(tmp_path / "mine", val=open_source(tmp_path / "theirs"))
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.test_origin == "2 images of theirs"
    assert data.notes == ("--val takes the place of test (4 images) of mine",)


# Broken images


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", per_class=15, classes=2, side=40)


def some_broken(photos: Path) -> tuple[Dataset, list[str]]:
    """The data set while it is whole, and images of both splits that are damaged afterwards."""
    whole = load_dataset(photos)
    chosen = [whole.test.paths[1], whole.train.paths[0], whole.train.paths[9], whole.train.paths[20]]
    damage(*(photos / path for path in chosen))
    return whole, chosen


def test_all_broken_images_are_named_in_one_message(photos: Path) -> None:
    _, chosen = some_broken(photos)
    with pytest.raises(BadInput) as caught:
        load_dataset(photos)
    said = str(caught.value)
    assert said.startswith("cannot read 4 images (")
    assert sum(path in said for path in chosen) == 3
    assert "…" in said
    assert said.endswith("--skip-broken")
    (photos / chosen[0]).unlink()
    with pytest.raises(BadInput) as caught:
        load_dataset(photos)
    assert "cannot read 3 images" in str(caught.value)
    assert all(path in str(caught.value) for path in chosen[1:])


@pytest.mark.parametrize("cache", ["ram", "off", "auto"])
def test_broken_images_are_left_out_of_both_splits_and_the_others_stay_where_they_were(
    cache: str, photos: Path
) -> None:
    whole, chosen = some_broken(photos)
    data = load_dataset(photos, skip_broken=True, cache=cache)
    assert sorted(one.path for _, one in data.broken) == sorted(chosen)
    assert all(one.reason for _, one in data.broken)
    assert all((split == "test") == (one.path in whole.test.paths) for split, one in data.broken)
    for split, before in ((data.train, whole.train), (data.test, whole.test)):
        kept = torch.tensor([path not in chosen for path in before.paths])
        assert list(split.paths) == [path for path in before.paths if path not in chosen]
        assert split.truth.tolist() == before.truth[kept].tolist()
        assert split.label.tolist() == before.label[kept].tolist()
        everything = split.read(torch.arange(len(split)), 128)
        wanted = [before.images[i] for i in kept.nonzero()[:, 0].tolist()]
        assert all(torch.equal(one, other) for one, other in zip(everything, wanted, strict=True))
    assert data.in_memory == (cache != "off")
    assert isinstance(data.train.images, Images) == (cache == "off")


def test_images_that_are_not_cached_are_not_read_before_they_are_needed(photos: Path) -> None:
    _, chosen = some_broken(photos)
    data = load_dataset(photos, cache="off")
    assert (len(data.train) + len(data.test), data.broken) == (30, ())
    place = list(data.train.paths).index(chosen[1])
    with pytest.raises(Unreadable, match=chosen[1]):
        data.train.read(torch.tensor([place]), 64)


def test_what_is_known_to_be_broken_is_left_out_again(photos: Path) -> None:
    _, chosen = some_broken(photos)
    found = load_dataset(photos, skip_broken=True, cache="off")
    again = load_images(
        open_source(photos),
        Recipe(skip_broken=True, cache="off"),
        64,
        known_broken={(split, path) for split in ("train", "test") for path in chosen},
    )
    assert (again.train.paths, again.test.paths) == (found.train.paths, found.test.paths)


def test_a_pile_that_is_broken_altogether_is_refused(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_text("no image")
    with pytest.raises(BadInput, match=r"no train image of .* can be read"):
        load_dataset(tmp_path, skip_broken=True)
    with pytest.raises(BadInput, match="cannot read 1 image"):
        cmsf.train("msf-small", tmp_path, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_lists_what_it_left_out_and_goes_on_without_it(photos: Path, tmp_path: Path) -> None:
    _, chosen = some_broken(photos)
    settings = FAST | {"skip_broken": True, "cache": "off", "workers": 0, "quiet": True, "size": 16}
    run = cmsf.train("msf-small", photos, tmp_path / "run", **settings)
    header, *rows = (run.path / "broken.csv").read_text().splitlines()
    assert header == "split,path,reason"
    assert sorted(row.split(",")[1] for row in rows) == sorted(chosen)
    assert len(run.data().train) + len(run.data().test) == 26
    assert cmsf.train("msf-small", photos, tmp_path / "run", **settings).path == run.path


def test_images_of_two_sources_may_have_the_same_names_and_be_broken_in_one_or_both(
    photos: Path, tmp_path: Path
) -> None:
    theirs = write_photos(tmp_path / "theirs", per_class=15, classes=2, side=40)
    paths = open_source(photos).train.images.paths
    damage(photos / paths[0], photos / paths[1], theirs / paths[1], theirs / paths[2])
    settings = FAST | {"skip_broken": True, "cache": "off", "val": theirs, "workers": 0, "quiet": True, "size": 16}
    run = cmsf.train("msf-small", photos, tmp_path / "run", **settings)
    data = run.data()
    assert data.train.paths == [*paths[2:]]
    assert data.test.paths == [paths[0], *paths[3:]]
    assert cmsf.train("msf-small", photos, tmp_path / "run", **settings).path == run.path


# Memory


def test_images_are_cached_by_their_measured_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        put(tmp_path / "ab"[i % 2] / f"{i}.png", i, size=(40, 30))
    decoded = 20 * 3 * 40 * 30  # the test split counts too
    for available, fits in ((2 * decoded, True), (2 * decoded - 2, False)):
        monkeypatch.setattr("cmsf.data.prepare.available_memory", lambda available=available: available)
        data = load_dataset(tmp_path)
        assert data.in_memory == fits
        assert isinstance(data.test.images, Images) != fits
        assert load_dataset(tmp_path, cache="ram").in_memory
        assert not load_dataset(tmp_path, cache="off").in_memory


def test_large_images_count_as_what_is_kept_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        put(tmp_path / f"{i}.png", i, size=(400, 200))
    kept = 6 * 3 * 100 * 50  # twice a view of 25
    monkeypatch.setattr("cmsf.data.prepare.available_memory", lambda: 2 * kept)
    data = load_dataset(tmp_path, size=25)
    assert data.in_memory
    assert tuple(data.train.images.shape) == (6, 3, 50, 100)
    assert not load_dataset(tmp_path, size=26).in_memory


def test_cached_and_uncached_images_have_the_same_pixels(photos: Path) -> None:
    cached, uncached = (load_dataset(photos, cache=cache) for cache in ("ram", "off"))
    everything = torch.arange(len(cached.train))
    for one, other in zip(cached.train.read(everything, 128), uncached.train.read(everything, 128), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
