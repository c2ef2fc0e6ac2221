"""Few labels: a linear classifier on frozen features, and the fine-tuned network, with a subset of the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from cmsf.data import Dataset
from cmsf.data.labels import Labels, share_of_each_class
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.finetune import HEAD, FineTuneSettings, fine_tune
from cmsf.evaluation.logistic import LOGISTIC, fit_logistic
from cmsf.evaluation.metrics import Accuracy, Result
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import evaluation_splits
from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.progress import progress_prefix

SHARES = (0.01, 0.1)


@dataclass(frozen=True)
class LabelSubset:
    """Indices of training images, and their labels."""

    name: str
    origin: str
    index: Int[Tensor, " m"]
    label: Int[Tensor, " m"]


def seeded_subsets(data: Dataset, seed: int) -> list[LabelSubset]:
    """Returns 1 % and 10 % of each class, rounded, and at least one image."""
    subsets = []
    for share in SHARES:
        labels = share_of_each_class(Labels(data.train.truth, data.classes), share, seed)
        index = labels.known.nonzero()[:, 0]
        origin = f"{share:.0%} of each class, by seed {seed}"
        subsets.append(LabelSubset(f"{100 * share:g} %", origin, index, labels.number[index]))
    return subsets


def subset_from_list(file: Path, names: Mapping[str, str | None], data: Dataset) -> LabelSubset:
    """Returns the training images that a list names, all of them.

    names: the label that the list gives to each path of the source; None: none. Those of test images are left out.
    """
    unknown = sorted({name for name in names.values() if name is not None} - set(data.classes))
    if unknown:
        raise BadInput(f"{file} has the label {unknown[0]!r}, which is not a class of {data.name}")
    labels = Labels.from_names([names.get(path) for path in data.train.paths], data.classes)
    index = labels.known.nonzero()[:, 0]
    if not len(index):
        raise BadInput(f"{file} has no labels of training images of {data.name}")
    content = sha256(expand_user(file).read_bytes()).hexdigest()
    return LabelSubset(file.stem, f"the list {file.name} (sha256 {content})", index, labels.number[index])


def evaluate_few_labels(
    extractor: FeatureExtractor, data: Dataset, subsets: Sequence[LabelSubset], seed: int
) -> Result:
    """Evaluates a linear classifier and a fine-tuned network for each subset of labels, on the test images."""
    _, test = evaluation_splits(data)
    names, classes = [subset.name for subset in subsets], len(data.classes)
    if len(set(names)) < len(names):
        raise BadInput(f"two lists of labels are called {max(names, key=names.count)}; rename one of them")
    settings, accuracies, described = FineTuneSettings(), {}, {}
    for number, subset in enumerate(subsets, 1):
        present = len(subset.label.unique())
        if present < 2:
            raise BadInput(f"{subset.name} has labels of {present} class; a classifier needs at least 2")
        with progress_prefix(f"{subset.name}, {number} of {len(subsets)}"):
            train = data.train.subset(subset.index)
            features = extractor(data.train)[subset.index.to(extractor.device)]
            fit = fit_logistic(features, subset.label.to(features.device), classes)
            linear_scores = fit.layer(extractor(test)).cpu()
            accuracies[f"{subset.name} linear"] = Accuracy.top_k(linear_scores, test.truth)
            network = fine_tune(extractor, train, subset.label, features.shape[1], classes, seed, settings)
            accuracies[f"{subset.name} tuned"] = Accuracy.top_k(predict_scores(network, test, extractor), test.truth)
        described[subset.name] = {
            "labels": f"{subset.origin}: {len(train)} images of {present} classes",
            "linear": fit.choice,
            "tuned": {"head": HEAD, "course": settings.describe(len(train)), "seed": seed},
        }
    protocol = {
        "labels": described,
        "linear": f"one linear layer on frozen features of clean views: {LOGISTIC}",
        "tuned": "the whole network and a head, evaluated on rounded views",
        **extractor.protocol(data.train, test),
        "train images": {subset.name: len(subset.index) for subset in subsets},
        "test images": len(test),
        "classes": classes,
        "test split": data.test_origin,
    }
    return Result(accuracies, protocol)
