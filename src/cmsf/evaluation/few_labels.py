"""Few labels: a linear layer on frozen features, and the whole network fine-tuned, with a share of the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.data import Dataset
from cmsf.data.labels import Labels, share_of_each_class
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.finetune import HEAD, FineTuneSettings, fine_tune
from cmsf.evaluation.linear import STANDARDISED, StandardScaler, fit_linear
from cmsf.evaluation.metrics import Accuracy, Result, in_top_k
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import evaluation_splits
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.progress import progress_prefix

SHARES = (0.01, 0.1)


@dataclass(frozen=True)
class LabelSubset:
    """Some training images by index, and the labels that are known of them."""

    name: str
    origin: str
    index: Int[Tensor, " m"]
    label: Int[Tensor, " m"]


def seeded_subsets(data: Dataset, seed: int) -> list[LabelSubset]:
    """1 % and 10 % of each class, rounded, and one image at least."""
    found = []
    for share in SHARES:
        kept = share_of_each_class(Labels(data.train.truth, data.classes), share, seed)
        index = kept.known.nonzero()[:, 0]
        found.append(
            LabelSubset(f"{100 * share:g} %", f"{share:.0%} of each class, by seed {seed}", index, kept.number[index])
        )
    return found


def subset_from_list(file: Path, names: Mapping[str, str | None], data: Dataset) -> LabelSubset:
    """Returns the training images that a list names, all of them.

    names: the label that the list gives to each path of the source; None: none. Those of test images are left out.
    """
    number = {name: place for place, name in enumerate(data.classes)}
    unknown = sorted({name for name in names.values() if name is not None} - set(number))
    if unknown:
        raise BadInput(f"{file} has the label {unknown[0]!r}, which is not a class of {data.name}")
    labelled = [(i, name) for i, path in enumerate(data.train.paths) if (name := names.get(path)) is not None]
    if not labelled:
        raise BadInput(f"{file} has no labels of training images of {data.name}")
    content = sha256(expand_user(file).read_bytes()).hexdigest()
    index, label = (torch.tensor(column) for column in zip(*((i, number[name]) for i, name in labelled), strict=True))
    return LabelSubset(file.stem, f"the list {file.name} (sha256 {content})", index, label)


def evaluate_few_labels(features: FeatureExtractor, data: Dataset, few: Sequence[LabelSubset], seed: int) -> Result:
    """Both classifiers for each share of labels, on the test images."""
    _, test = evaluation_splits(data)
    names = [some.name for some in few]
    if len(set(names)) < len(names):
        raise BadInput(f"two lists of labels are called {max(names, key=names.count)}; rename one of them")
    course, judged, described = FineTuneSettings(), {}, {}
    for number, some in enumerate(few, 1):
        if len(some.label.unique()) < 2:
            raise BadInput(f"{some.name} has labels of {len(some.label.unique())} class; two are needed to tell apart")
        with progress_prefix(f"{some.name}, {number} of {len(few)}"):
            train = data.train.subset(some.index)
            known = features(data.train)[some.index.to(features.device)]
            scale = StandardScaler.fit(known)
            layer, chosen = fit_linear(scale(known), some.label.to(known.device), len(data.classes))
            scores = layer(scale(features(test))).cpu()
            judged[f"{some.name} linear"] = Accuracy(in_top_k(scores, test.truth, 1), test.truth)
            network = fine_tune(features, train, some.label, known.shape[1], len(data.classes), seed, course)
            judged[f"{some.name} tuned"] = Accuracy(
                in_top_k(predict_scores(network, test, features), test.truth, 1), test.truth
            )
        described[some.name] = {
            "labels": f"{some.origin}: {len(train)} images of {len(some.label.unique())} classes",
            "linear": chosen | {"layer": STANDARDISED},
            "tuned": {"head": HEAD, "course": course.describe(len(train)), "seed": seed},
        }
    protocol = {
        "labels": described,
        "linear": "one linear layer on frozen features of clean views, LBFGS to convergence",
        "tuned": "the whole network and a head",
        "transform": features.transform,
        "train images": {some.name: len(some.index) for some in few},
        "test images": len(test),
        "classes": len(data.classes),
        "test split": data.test_origin,
    }
    return Result(judged, protocol)
