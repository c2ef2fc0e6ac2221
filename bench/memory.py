"""How much memory training and evaluation need, beside what they cannot do without.

    python bench/memory.py --out docs/results/bench/memory.json

Each part runs in a process of its own, whose peak is read from the kernel (Linux).

training    The resident memory of a run at its peak, beside the sum of its parts: weights, gradients and momentum of
            the online network, the target, bank and companions, the cache, views, and what autograd keeps of a batch.
            ResNet-50 at 224 px with ImageNet's bank and cache for 50 steps on made-up images, and
            EfficientNet-Lite0 at 128 px with batches of 128.
linear      A linear layer of 1,000 classes on 1,281,167 × 2,048 features, beside the one copy of the features that
            has to be there: all of `fit_linear` but for its number of iterations, which is one for each fit.
k-NN        20-NN of 1,000 queries in the same features. Memory does not depend on the number of queries, which are
            searched a block at a time.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reporting import Target, measure_from_command_line
from torch import Tensor

from cmsf.data.transforms import WholeBatch
from cmsf.evaluation import linear
from cmsf.evaluation.knn import KNN_CLASSIFIERS, classify
from cmsf.method.build import make_learner
from cmsf.method.losses import FIRST, SECOND
from cmsf.models.backbones import feature_width, make_backbone
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.utils.constants import UNKNOWN

IMAGENET, WIDTH, CLASSES, QUERIES = 1_281_167, 2_048, 1_000, 1_000
GIB = 2**30


def read_status(name: str) -> int:
    """Returns a figure of this process in bytes, by its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def train(backbone: str, size: int, batch: int, images: int, bank: int, steps: int) -> dict[str, float]:
    """Returns the gigabytes of each part, and of the process at its peak beyond what it had before."""
    before = read_status("VmRSS")
    width = feature_width(make_backbone(backbone, size=size), backbone, size)
    recipe = replace(get_recipe("cmsf-self-imagenet", small_images=False), backbone=backbone, cache="off")
    numbers = {"bank_size": bank, "batch_size": batch, "size": size, "support_classes": 0, "support_images": 0}
    numbers |= {"projection_hidden": 2 * width, "projection_dim": width // 4, "prediction_hidden": 2 * width}
    numbers |= {"extra_size": 96, "weak_crop": 0.2, "strong_crop": 0.2, "warmup_epochs": 0}
    learner = make_learner(
        ResolvedRecipe(**(vars(recipe.filled(ResolvedRecipe.usual())) | numbers)), torch.full((images,), UNKNOWN), "cpu"
    )
    for vectors in (learner.bank.embedding, learner.bank.companion, learner.supervision.companion_cache.embedding):
        vectors.fill_(0.5)  # memory that is not written to yet is not there yet
    views = [torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last) for _ in range(2)]
    learner.views = {FIRST: lambda *_: views[0], SECOND: lambda *_: views[1]}  # type: ignore[dict-item]

    kept: dict[int, int] = {}
    counted = [*learner.encoders.parameters(), *views]
    own = {tensor.untyped_storage().data_ptr() for tensor in counted}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def step(number: int) -> None:
        index = torch.arange(number * batch, (number + 1) * batch) % images
        learner.step(WholeBatch(index, 0, 0, torch.empty(batch, 3, 1, 1, dtype=torch.uint8)), 0.99)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(0)
    for number in range(1, steps):
        step(number)
    online = nbytes(learner.encoders.trainable_parameters())
    parts = {
        "weights, gradients, momentum": 3 * online,
        "target": nbytes(learner.encoders.target.parameters()),
        "bank and companions": nbytes([learner.bank.embedding, learner.bank.companion]),
        "cache": nbytes([learner.supervision.companion_cache.embedding]),
        "views": nbytes(views),
        "what autograd keeps": sum(kept.values()),
    }
    parts |= {"sum": sum(parts.values()), "peak": read_status("VmHWM") - before}
    return {name: round(size / GIB, 3) for name, size in parts.items()}


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def made_up_features() -> Tensor:
    features = torch.empty(IMAGENET, WIDTH)
    for block in features.split(8192):
        block.normal_()
    return features


def fit() -> dict[str, float]:
    linear._MAX_ITERATIONS, linear.WEIGHT_DECAYS = 1, (1e-2, 1e-3, 1e-4)
    features, label = made_up_features(), torch.randint(CLASSES, (IMAGENET,))
    before, held = read_status("VmRSS"), features.nbytes
    scale = linear.StandardScaler.fit(features)
    linear.fit_linear(scale.apply_(features), label, CLASSES)
    return {"features": round(held / GIB, 3), "beside them": round((read_status("VmHWM") - before) / GIB, 3)}


def search() -> dict[str, float]:
    features, label = made_up_features(), torch.randint(CLASSES, (IMAGENET,))
    before, held = read_status("VmRSS"), features.nbytes
    classify(features[:QUERIES].clone(), features, label, KNN_CLASSIFIERS)
    return {"features": round(held / GIB, 3), "beside them": round((read_status("VmHWM") - before) / GIB, 3)}


PARTS: dict[str, tuple[Callable[..., dict[str, float]], tuple[Any, ...]]] = {
    "training, ResNet-50 at 224 px, ImageNet's bank and cache": (train, ("resnet50", 224, 16, IMAGENET, 128_000, 50)),
    "training, EfficientNet-Lite0 at 128 px": (train, ("tf_efficientnet_lite0", 128, 128, 3_068, 3_068, 8)),
    "linear, 1,281,167 × 2,048": (fit, ()),
    "k-NN, 1,281,167 × 2,048": (search, ()),
}


def measure(rounds: int) -> dict[str, Any]:
    """Once each: a peak is not a matter of chance."""
    found: dict[str, dict[str, float]] = {}
    for name, (part, given) in PARTS.items():
        with multiprocessing.get_context("spawn").Pool(1) as process:
            found[name] = process.apply(part, given)
        print(name, json.dumps(found[name]), flush=True)
    targets = []
    for name, parts in found.items():
        if "peak" in parts:
            targets.append(Target(name, parts["peak"] / parts["sum"], 1.25, "of the sum of its parts", at_most=True))
        else:
            targets.append(Target(name, parts["beside them"] / parts["features"], 0.1, "of the features", at_most=True))
    return {"gigabytes": found, "targets": targets}


if __name__ == "__main__":
    measure_from_command_line(__doc__, measure)
