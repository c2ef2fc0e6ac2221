"""A classifier's scores and predictions of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.data import Split, Unreadable, load_batches
from cmsf.evaluation.features import BATCH, FeatureExtractor, eval_mode
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track

PLACES = 5
"""The classes of a prediction, at most."""


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image, in descending order, and their probabilities; or why there are none."""

    path: str
    labels: tuple[str, ...]
    confidences: tuple[float, ...]
    error: str | None = None

    @property
    def label(self) -> str | None:
        return self.labels[0] if self.labels else None

    @property
    def confidence(self) -> float | None:
        return self.confidences[0] if self.confidences else None


def predict(network: nn.Module, split: Split, extractor: FeatureExtractor, names: tuple[str, ...]) -> list[Prediction]:
    """Returns a prediction for every image, in their order; an unreadable one has its error instead."""
    predictions: dict[int, Prediction] = {}

    def record_error(i: int, error: Unreadable) -> None:
        predictions[i] = Prediction(split.paths[i], (), (), error.reason)

    for index, scores in predict_batches(network, split, extractor, record_error):
        confidence, number = (top[:, :PLACES] for top in scores.softmax(1).sort(dim=1, descending=True, stable=True))
        for i, numbers, confidences in zip(index.tolist(), number.tolist(), confidence.tolist(), strict=True):
            labels = tuple(names[number] for number in numbers)
            predictions[i] = Prediction(split.paths[i], labels, tuple(confidences))
    return [predictions[i] for i in range(len(split))]


def predict_scores(network: nn.Module, split: Split, extractor: FeatureExtractor) -> Float[Tensor, "n c"]:
    """Returns the scores before the softmax; an image that cannot be read raises Unreadable."""
    return torch.cat([scores for _, scores in predict_batches(network, split, extractor)])


def predict_readable(
    network: nn.Module, split: Split, extractor: FeatureExtractor
) -> tuple[Int[Tensor, " m"], Float[Tensor, "m c"]]:
    """Returns the indices of the images that can be read, and their scores."""
    batches = list(predict_batches(network, split, extractor, on_unreadable=lambda i, error: None))
    if not batches:
        raise BadInput(f"none of {len(split)} images can be read, the first is {split.paths[0]}; repair them")
    index, scores = zip(*batches, strict=True)
    return torch.cat(index), torch.cat(scores)


def predict_batches(
    network: nn.Module,
    split: Split,
    extractor: FeatureExtractor,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
) -> Iterator[tuple[Int[Tensor, " b"], Float[Tensor, "b c"]]]:
    """Yields indices and scores of clean views, on the CPU.

    Views are cut one by one whether or not all images are of one size, so that an image has the same score alone, in
    a folder of others, and in the test split that its classifier was evaluated on.
    """
    if isinstance(split.images, Tensor):
        split = replace(split, images=list(split.images))
    crop = extractor.preprocessing.center_crop()
    plan = ((0, index) for index in torch.arange(len(split)).split(BATCH))
    device, workers = extractor.device, extractor.workers
    batches = load_batches(split, plan, {0: crop}, seed=0, device=device, workers=workers, on_unreadable=on_unreadable)
    dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
    with eval_mode(network), torch.no_grad():
        for batch in track(batches, "predicting", len(split), BATCH):
            scores = network(extractor.preprocessing.normalize(batch.crop(crop, 0)).to(dtype)).float().cpu()
            bad = int((~scores.isfinite().all(1)).sum())
            if bad:
                raise BadInput(
                    f"the classifier's scores of {bad} of {len(scores)} images are NaN or inf: it has diverged; "
                    "fine-tune with a smaller --lr"
                )
            yield batch.index, scores
