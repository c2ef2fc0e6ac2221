from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import write_npz, write_photos
from PIL import Image

from cmsf.data import Dataset, Source, open_source
from cmsf.data.prepare import load_dataset as load_images
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput


def load_dataset(source: Source, seed: int = 0, size: int = 64, **changes) -> Dataset:
    return load_images(source, Recipe(seed=seed), size, **changes)


def test_the_embedded_sample_is_balanced_and_its_parts_are_apart() -> None:
    data = load_dataset(open_source(None), seed=0)
    assert len(data.train) == 10_000
    assert len(data.test) == 2_000
    assert data.train.truth.bincount().tolist() == [1000] * 10
    assert data.test.truth.bincount().tolist() == [200] * 10
    assert data.classes[0] == "T-shirt"
    train, test = ({image.numpy().tobytes() for image in part.images} for part in (data.train, data.test))
    assert not train & test


def test_class_folders_are_labels_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    data = load_dataset(open_source(write_photos(tmp_path / "photos", per_class=20, classes=3)), seed=0)
    assert data.classes == ("class 0", "class 1", "class 2")
    assert (len(data.train), len(data.test)) == (54, 6)
    assert not set(data.train.paths) & set(data.test.paths)
    for path, number in zip(data.train.paths, data.train.truth.tolist(), strict=True):
        assert path.startswith(data.classes[number])
    again = load_dataset(open_source(tmp_path / "photos"), seed=0)
    assert again.train.paths == data.train.paths
    assert load_dataset(open_source(tmp_path / "photos"), seed=1).test.paths != data.test.paths


def test_only_labelled_images_are_held_out(tmp_path: Path) -> None:
    label = np.full(60, -1)
    label[::3] = np.arange(20) % 2
    np.savez(tmp_path / "some.npz", x=np.zeros((60, 8, 8), np.uint8), y=label)
    data = load_dataset(open_source(tmp_path / "some.npz"), seed=0)
    assert data.test_origin == "2 of 20 labelled images, held out by seed 0"
    assert (data.test.truth != UNKNOWN).all()
    assert (len(data.train), len(data.train.labelled)) == (58, 18)


def test_a_flat_folder_is_unlabelled_and_nothing_is_held_out(tmp_path: Path) -> None:
    for i in range(5):
        Image.new("RGB", (30, 20), (i, i, i)).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.txt").write_text("no image")
    data = load_dataset(open_source(tmp_path), seed=0)
    assert len(data.train) == 5
    assert data.test is None
    assert data.train.truth.tolist() == [UNKNOWN] * 5


@pytest.mark.parametrize(("training", "testing"), [("train", "test"), ("trainval", "val")])
def test_split_folders_are_splits(tmp_path: Path, training: str, testing: str) -> None:
    write_photos(tmp_path / training, per_class=4, classes=3)
    write_photos(tmp_path / testing, per_class=2, classes=3)
    data = load_dataset(open_source(tmp_path), seed=0)
    assert (len(data.train), len(data.test)) == (12, 6)
    assert data.test_origin == f"6 images of {testing}"
    assert data.test.truth.bincount().tolist() == [2, 2, 2]


def test_photos_are_turned_upright_shrunk_and_coloured(tmp_path: Path) -> None:
    tall = Image.new("L", (400, 200))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    tall.save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGBA", (50, 60), (255, 0, 0, 255)).save(tmp_path / "b.png")
    data = load_dataset(open_source(tmp_path), size=50)
    assert [tuple(picture.shape) for picture in data.train.images] == [(3, 200, 100), (3, 60, 50)]
    assert data.train.images[1][:, 0, 0].tolist() == [255, 0, 0]


def test_arrays_with_labels_are_read_and_split(tmp_path: Path) -> None:
    data = load_dataset(open_source(write_npz(tmp_path / "bars.npz", per_class=25)), seed=0)
    assert (len(data.train), len(data.test)) == (90, 10)
    assert data.train.images.shape == (90, 1, 16, 16)


def test_colour_arrays_come_channels_first(tmp_path: Path) -> None:
    images = np.zeros((6, 8, 9, 3), np.uint8)
    images[..., 2] = 200
    np.savez(tmp_path / "blue.npz", x_train=images, y_train=np.arange(6) % 2, x_test=images, y_test=np.arange(6) % 2)
    data = load_dataset(open_source(tmp_path / "blue.npz"), seed=0)
    assert torch.equal(data.test.images.float().mean((0, 2, 3)), torch.tensor([0.0, 0.0, 200.0]))


def test_labels_may_be_any_numbers_and_test_may_have_more_classes(tmp_path: Path) -> None:
    images = np.zeros((6, 8, 8), np.uint8)
    arrays = {"x_train": images, "y_train": np.array([7, 7, 40, 40, -1, 7]), "x_test": images[:3]}
    np.savez(tmp_path / "odd.npz", **arrays, y_test=np.array([40, 1000, 7], np.uint16))
    data = load_dataset(open_source(tmp_path / "odd.npz"), seed=0)
    assert data.classes == ("7", "40", "1000")
    assert data.train.truth.tolist() == [0, 0, 1, 1, UNKNOWN, 0]
    assert data.test.truth.tolist() == [1, 2, 0]


def test_folders_are_splits_only_where_all_of_them_are(tmp_path: Path) -> None:
    for name in ("car", "plane", "train"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("RGB", (20, 20), (i, 0, 0)).save(tmp_path / name / f"{i}.png")
    data = load_dataset(open_source(tmp_path), seed=0)
    assert data.classes == ("car", "plane", "train")
    assert len(data.train) + len(data.test) == 30


def test_a_stray_image_beside_class_folders_is_said(tmp_path: Path) -> None:
    write_photos(tmp_path, per_class=3, classes=2)
    Image.new("RGB", (20, 20)).save(tmp_path / "stray.png")
    data = load_dataset(open_source(tmp_path), seed=0)
    assert not len(data.train.labelled)
    assert "1 images lie in" in data.notes[0]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no images below"):
        open_source(tmp_path)
    (tmp_path / "list.txt").write_text("a")
    with pytest.raises(BadInput, match="is not a source of images"):
        open_source(tmp_path / "list.txt")
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(BadInput, match=r"cannot read .*broken\.npz"):
        open_source(tmp_path / "broken.npz")
    np.savez(tmp_path / "float.npz", x=np.zeros((3, 4, 4)))
    with pytest.raises(BadInput, match="float64"):
        open_source(tmp_path / "float.npz")
    np.savez(tmp_path / "short.npz", x=np.zeros((3, 4, 4), np.uint8), y=np.zeros(2, int))
    with pytest.raises(BadInput, match="3 images but labels"):
        open_source(tmp_path / "short.npz")
    for name, y in (("negative", [-2, 0, 1]), ("huge", [2**40, 0, 1])):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((3, 4, 4), np.uint8), y=np.array(y))
        with pytest.raises(BadInput, match="use 0, 1, 2 … and -1 for none"):
            open_source(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "flat.npz", x=np.zeros((3, 0, 4), np.uint8))
    with pytest.raises(BadInput, match="no pixels"):
        open_source(tmp_path / "flat.npz")
    np.savez(tmp_path / "few.npz", x=np.zeros((3, 4, 4), np.uint8), y=np.arange(3), classes=np.array(["a"]))
    with pytest.raises(BadInput, match="1 names, and the highest label is 2"):
        open_source(tmp_path / "few.npz")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").replace(tmp_path / "one.npz")
    for name in ("empty", "one"):
        with pytest.raises(BadInput, match="plain arrays"):
            open_source(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "object.npz", x=np.array([{}], dtype=object))
    with pytest.raises(BadInput, match="plain arrays"):
        open_source(tmp_path / "object.npz")


def test_a_truncated_photo_is_named(tmp_path: Path) -> None:
    Image.effect_noise((200, 200), 90).save(tmp_path / "good.jpg")
    whole = (tmp_path / "good.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"cannot read 1 image \(half\.jpg: .*--skip-broken"):
        load_dataset(open_source(tmp_path), seed=0)
