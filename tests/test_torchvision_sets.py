import pickle
import struct
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from cmsf.data.images import ArrayImages, FileImages
from cmsf.data.sources.torchvision import SetImages, default_root, open_torchvision
from cmsf.utils.errors import BadInput


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise URLError("no network here")

    for module in ("mnist", "eurosat", "imagenette", "stl10"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.download_and_extract_archive", fail)


def _write_idx(file: Path, values: np.ndarray) -> None:
    """An array of bytes in the format of MNIST."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack(f">I{values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes())


def _write_fashion(root: Path, train: int = 12, test: int = 6) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    pixels = {}
    for part, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        pixels[part] = generator.integers(256, size=(count, 28, 28), dtype=np.uint8)
        _write_idx(root / "FashionMNIST" / "raw" / f"{prefix}-images-idx3-ubyte", pixels[part])
        _write_idx(root / "FashionMNIST" / "raw" / f"{prefix}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 3)
    return pixels


def _write_image(file: Path, red: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (red, 0, 0)).save(file)


def test_arrays_of_a_set_become_its_parts(tmp_path: Path) -> None:
    pixels = _write_fashion(tmp_path)
    source = open_torchvision(f"FashionMNIST@{tmp_path}")
    assert source.name == "FashionMNIST"
    assert list(source.splits) == ["train", "test"]
    assert isinstance(source.train.images, ArrayImages)
    assert torch.equal(source.train.images.tensor[:, 0], torch.from_numpy(pixels["train"]))
    assert np.array_equal(np.asarray(source.splits["test"].images.open(4)), pixels["test"][4])
    assert source.classes == ("T-shirt/top", "Trouser", "Pullover")
    assert source.train.names[:4] == ["T-shirt/top", "Trouser", "Pullover", "T-shirt/top"]
    assert source.train.images.paths[3] == "train/3"
    assert not source.notes


def test_the_usual_folder_is_below_cmsf_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMSF_DATA", str(tmp_path))
    assert default_root() == tmp_path / "torchvision"
    _write_fashion(tmp_path / "torchvision")
    assert len(open_torchvision("FashionMNIST").train) == 12
    monkeypatch.delenv("CMSF_DATA")
    assert default_root() == Path.home() / ".cache" / "cmsf" / "torchvision"


def test_a_set_without_splits_is_training_images_by_path(tmp_path: Path) -> None:
    for number, name in enumerate(("River", "Forest", "Höhe")):
        for i in range(2):
            _write_image(tmp_path / "eurosat" / "2750" / name / f"{name}_{i}.png", 10 * number + i)
    source = open_torchvision(f"EuroSAT@{tmp_path}")
    assert list(source.splits) == ["train"]
    assert isinstance(source.train.images, FileImages)
    assert source.classes == ("Forest", "Höhe", "River")
    assert list(source.train.images.paths) == sorted(source.train.images.paths)
    place = list(source.train.images.paths).index("eurosat/2750/River/River_1.png")
    assert source.train.names[place] == "River"
    assert source.train.images.open(place).getpixel((0, 0)) == (1, 0, 0)


def test_splits_and_classes_of_several_names(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        for wordnet in ("n01440764", "n03000684"):
            for i in range(count):
                _write_image(tmp_path / "imagenette2" / split / wordnet / f"{i}.JPEG", i)
    source = open_torchvision(f"Imagenette@{tmp_path}")
    assert {part: len(images) for part, images in source.splits.items()} == {"train": 6, "val": 4}
    assert source.classes == ("tench", "chain saw")
    assert source.splits["val"].names == ["tench"] * 2 + ["chain saw"] * 2
    assert source.splits["val"].images.paths[0] == "imagenette2/val/n01440764/0.JPEG"


def test_unlabelled_images_of_stl10_are_trained_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for name, count in (("train", 4), ("unlabeled", 3), ("test", 2)):
        pixels = np.zeros((count, 3, 96, 96), np.uint8)
        pixels[:, :, 5, 70] = 200  # stored column by column
        pixels.tofile(folder / f"{name}_X.bin")
        if name != "unlabeled":
            (np.arange(count, dtype=np.uint8) % 2 + 1).tofile(folder / f"{name}_y.bin")
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    monkeypatch.setattr(torchvision.datasets.STL10, "_check_integrity", lambda _: True)
    source = open_torchvision(f"STL10@{tmp_path}")
    assert source.train.names == ["airplane", "bird", "airplane", "bird", None, None, None]
    assert source.splits["test"].names == ["airplane", "bird"]
    assert "val" not in source.splits
    picture = np.asarray(source.train.images.open(6))
    assert picture.shape == (96, 96, 3)
    assert picture[70, 5].tolist() == [200, 200, 200]


def test_a_set_that_opens_its_own_images_survives_pickling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.FakeData.__init__, "__defaults__", (20, (3, 8, 8), 4, None, None, 0))
    source = open_torchvision("FakeData")
    content = torchvision.datasets.FakeData()
    images = source.train.images
    assert isinstance(images, SetImages)
    assert (len(images), images.paths[7]) == (20, "train/7")
    assert source.train.names == [str(content[i][1]) for i in range(20)]
    assert source.classes == ("0", "1", "2", "3")
    images.content.module = sys  # some sets hold what cannot be pickled
    copy = pickle.loads(pickle.dumps(images))
    for i in (0, 19):
        assert np.array_equal(np.asarray(copy.open(i)), np.asarray(content[i][0]))
    assert images.decode(3, 8).shape == (3, 8, 8)


def test_targets_that_are_no_classes_leave_images_unlabelled(tmp_path: Path) -> None:
    voc = tmp_path / "VOCdevkit" / "VOC2012"
    for split, name in (("train", "a"), ("val", "b")):
        _write_image(voc / "JPEGImages" / f"{name}.jpg", 5)
        (voc / "Annotations").mkdir(exist_ok=True)
        (voc / "Annotations" / f"{name}.xml").write_text("<annotation><object><name>cat</name></object></annotation>")
        (voc / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
        (voc / "ImageSets" / "Main" / f"{split}.txt").write_text(name)
    source = open_torchvision(f"VOCDetection@{tmp_path}")
    assert (source.train.names, source.splits["val"].names, source.classes) == ([None], [None], ())
    assert source.notes == ("the train and val images of torchvision:VOCDetection come without classes",)


def test_missing_files_are_looked_for_downloaded_and_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"EuroSAT is not at .* cannot be downloaded \(.*no network here") as error:
        open_torchvision(f"EuroSAT@{tmp_path}")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match="torchvision does not download it"):
        open_torchvision(f"FER2013@{tmp_path}")


def test_a_split_that_is_missing_is_no_smaller_set(tmp_path: Path) -> None:
    _write_fashion(tmp_path)
    (tmp_path / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(BadInput, match="FashionMNIST is not at"):
        open_torchvision(f"FashionMNIST@{tmp_path}")


def test_a_package_that_a_set_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(BadInput, match="ImageNet needs scipy: pip install scipy"):
        open_torchvision(f"ImageNet@{tmp_path}")


def test_a_wrong_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no set called 'Cifar10'; did you mean CIFAR10"):
        open_torchvision("Cifar10")
    for name in ("ImageFolder", "CocoCaptions", "Kinetics", "wrap_dataset_for_transforms_v2"):
        with pytest.raises(BadInput, match="no set called"):
            open_torchvision(f"{name}@{tmp_path}")


def test_a_set_of_other_things_than_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "MovingMNIST").mkdir()
    np.save(tmp_path / "MovingMNIST" / "mnist_test_seq.npy", np.zeros((20, 2, 64, 64), np.uint8))
    with pytest.raises(BadInput, match="MovingMNIST"):
        open_torchvision(f"MovingMNIST@{tmp_path}")
