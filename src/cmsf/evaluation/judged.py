"""What an evaluation can be judged by: images of both splits whose classes are known."""

from __future__ import annotations

from cmsf.data import Dataset, Split
from cmsf.errors import BadInput


def can_judge(data: Dataset) -> bool:
    return data.test is not None and len(data.train.judged) > 0 and len(data.test.judged) > 0


def judged_splits(data: Dataset) -> tuple[Split, Split]:
    """Training and test images with known classes; one message where there are none."""
    if data.test is None or not can_judge(data):
        what = "test" if len(data.train.judged) else "training"
        raise BadInput(f"the {what} images of {data.name} have no labels to judge by; give labelled images with --data")
    return _judged(data.train), _judged(data.test)


def _judged(split: Split) -> Split:
    return split if len(split.judged) == len(split) else split.part(split.judged)
