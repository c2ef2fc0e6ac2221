"""Features that are kept on the disk: the same as computed anew, and never those of something else."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import noise_split, write_photos
from torch import Tensor, nn

from cmsf.data import Split, load_dataset, open_source
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor
from cmsf.recipes.recipe import Recipe
from cmsf.utils.errors import BadInput


class Counting(nn.Module):
    """A network that counts how many images it has seen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return self.layers(images).flatten(1)


def test_features_are_computed_once_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    network, split = Counting(), noise_split(30, 0)
    plain = FeatureExtractor(network, Preprocessing(12))(split)
    first = FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split)
    network.seen = 0
    assert torch.equal(FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split), first)
    assert network.seen == 0
    assert torch.equal(first, plain)


@pytest.mark.parametrize("what", ["weights", "statistics", "images", "order", "size"])
def test_whatever_features_depend_on_makes_them_anew(what: str, tmp_path: Path) -> None:
    network, split, size = Counting(), noise_split(30, 0), 12
    FeatureExtractor(network, Preprocessing(size), cache=tmp_path)(split)
    if what == "weights":
        network = Counting(seed=1)
    elif what == "statistics":
        network.layers[1].running_mean += 1
    elif what == "images":
        pictures = split.images.clone()
        pictures[-1, 0, 0, 0] += 1
        split = replace(split, images=pictures)
    elif what == "order":
        split = split.subset(torch.arange(29, -1, -1))
    else:
        size = 8
    network.seen = 0
    found = FeatureExtractor(network, Preprocessing(size), cache=tmp_path)(split)
    assert network.seen == 30
    assert torch.equal(found, FeatureExtractor(network, Preprocessing(size))(split))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_a_damaged_file_is_computed_again(damage: str, tmp_path: Path) -> None:
    network, split = Counting(), noise_split(30, 0)
    first = FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[:-40]
    elif damage == "flipped":
        content[-5] ^= 1
    else:
        content = bytearray(b"not safetensors")
    file.write_bytes(content)
    network.seen = 0
    assert torch.equal(FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split), first)
    assert network.seen == 30
    network.seen = 0
    FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split)
    assert network.seen == 0


def from_the_disk(folder: Path) -> Split:
    return load_dataset(open_source(folder), Recipe(cache="off"), 16).train


def test_images_on_the_disk_are_known_by_name_size_and_date(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 3, 2)
    split = from_the_disk(photos)
    before = split.fingerprint()
    assert before == from_the_disk(photos).fingerprint()
    file = photos / split.paths[0]
    os.utime(file, (1, 1))
    changed = from_the_disk(photos).fingerprint()
    assert changed != before
    file.write_bytes((photos / split.paths[1]).read_bytes())
    assert from_the_disk(photos).fingerprint() != changed


def test_the_network_keeps_its_mode_and_batchnorm_is_in_eval_mode(tmp_path: Path) -> None:
    network, split = Counting().train(), noise_split(30, 0)
    before = network.layers[1].running_mean.clone()
    features = FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(split)
    assert network.training
    assert torch.equal(network.layers[1].running_mean, before)
    assert torch.equal(features, FeatureExtractor(network.eval(), Preprocessing(12))(split))


def test_a_network_that_has_diverged_is_named(tmp_path: Path) -> None:
    network = Counting()
    with torch.no_grad():
        network.layers[0].weight[0] = torch.nan
    with pytest.raises(BadInput, match="features of 30 of 30 images have NaN or inf"):
        FeatureExtractor(network, Preprocessing(12), cache=tmp_path)(noise_split(30, 0))
    assert not list(tmp_path.iterdir())


def test_features_that_cannot_be_kept_are_used_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, split = Counting(), noise_split(30, 0)
    in_the_way = tmp_path / "features"
    in_the_way.write_text("a file")
    assert torch.equal(
        FeatureExtractor(network, Preprocessing(12), cache=in_the_way)(split),
        FeatureExtractor(network, Preprocessing(12))(split),
    )
    assert "features are not cached" in capsys.readouterr().err
