"""What a classifier says of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cmsf.data import Split, Unreadable, load_batches
from cmsf.data.transforms import CenterCrop, normalize_pixels
from cmsf.evaluation.features import BATCH, FeatureExtractor, batch_count, in_eval_mode
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track

PLACES = 5


@dataclass(frozen=True)
class Prediction:
    """An image's classes, the likeliest first and five at most, and how likely each is; or why there are none."""

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


def predict(network: nn.Module, split: Split, like: FeatureExtractor, names: tuple[str, ...]) -> list[Prediction]:
    """A prediction for every image, in their order."""
    found: dict[int, Prediction] = {}

    def leave(i: int, error: Unreadable) -> None:
        found[i] = Prediction(split.paths[i], (), (), error.reason)

    for index, scores in score_batches(network, split, like, leave):
        sure, number = scores.softmax(1).sort(dim=1, descending=True, stable=True)
        for i, some, best in zip(index.tolist(), sure[:, :PLACES].tolist(), number[:, :PLACES].tolist(), strict=True):
            found[i] = Prediction(split.paths[i], tuple(names[one] for one in best), tuple(some))
    return [found[i] for i in range(len(split))]


def score_all(network: nn.Module, split: Split, like: FeatureExtractor) -> Float[Tensor, "n c"]:
    """The scores that predictions are made from; an image that cannot be read raises Unreadable."""
    return torch.cat([scores for _, scores in score_batches(network, split, like)])


def score_readable(
    network: nn.Module, split: Split, like: FeatureExtractor
) -> tuple[Int[Tensor, " m"], Float[Tensor, "m c"]]:
    """The same of the images that can be read, and which these are."""
    found = list(score_batches(network, split, like, on_unreadable=lambda i, error: None))
    if not found:
        raise BadInput(f"none of {len(split)} images can be read, the first is {split.paths[0]}; mend them")
    index, scores = zip(*found, strict=True)
    return torch.cat(index), torch.cat(scores)


def score_batches(
    network: nn.Module,
    split: Split,
    like: FeatureExtractor,
    on_unreadable: Callable[[int, Unreadable], None] | None = None,
) -> Iterator[tuple[Int[Tensor, " b"], Float[Tensor, "b c"]]]:
    """Indices and class scores of clean views, on the CPU.

    Views are cut one by one whether or not all images are of one size, so that an image has the same score alone, in
    a folder of others, and in the test split that its classifier was judged on.
    """
    if isinstance(split.images, Tensor):
        split = replace(split, images=list(split.images))
    crop = CenterCrop(like.size)
    plan = ((0, index) for index in torch.arange(len(split)).split(BATCH))
    batches = load_batches(
        split,
        plan,
        {0: crop},
        seed=0,
        device=like.device,
        workers=like.workers,
        on_unreadable=on_unreadable,
    )
    dtype = next((weight.dtype for weight in network.parameters()), torch.float32)
    with in_eval_mode(network), torch.no_grad():
        for batch in track(batches, "predicting", batch_count(split)):
            scores = network(normalize_pixels(batch.crop(crop, 0)).to(dtype)).float().cpu()
            lost = int((~scores.isfinite().all(1)).sum())
            if lost:
                raise BadInput(
                    f"the classifier's scores of {lost} of {len(scores)} images are no numbers: it has diverged; "
                    "fine-tune with a smaller --lr"
                )
            yield batch.index, scores
