"""From a source to the data set of a run: splits, labels, and pixels in memory or on the disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from cmsf.data.dataset import Dataset, Split
from cmsf.data.decoding import shrink
from cmsf.data.images import ArrayImages, Images, ResizedImages, Unreadable, unreadable_message
from cmsf.data.labels import Labels, modify_labels, read_groups
from cmsf.data.source import Source, SourceSplit, sort_classes
from cmsf.data.sources.table import read_label_list
from cmsf.data.transforms import STORED_SCALE, DecodedImages
from cmsf.recipes.recipe import AUTO, Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput
from cmsf.utils.memory import available_memory
from cmsf.utils.progress import track
from cmsf.utils.rng import uniform

_MAX_MEMORY_SHARE = 0.5
_TEST_FRACTION = 10  # one in so many
_SPLITTING = 0x5917 << 40  # what this use of the hash is for; no epoch is ever so high


@dataclass(frozen=True)
class SeenImages:
    """By path: images that a run was tested on, and images whose label it was trained with."""

    test: Set[str]
    labelled: Set[str]


def load_dataset(
    source: Source,
    recipe: Recipe,
    size: int,
    *,
    labels: Path | None = None,
    val: Source | None = None,
    known_broken: Collection[tuple[str, str]] | None = None,
    seen: SeenImages | None = None,
) -> Dataset:
    """Returns images to train on with views of `size` pixels, and to test on, decoded where they fit into memory.

    labels, val, seen: as for `build_dataset`.
    known_broken: splits and paths found unreadable before, so that files need not be checked again.
    """
    return _decode(build_dataset(source, recipe, labels=labels, val=val, seen=seen), recipe, size, known_broken)


def build_dataset(
    source: Source,
    recipe: Recipe,
    *,
    labels: Path | None = None,
    val: Source | None = None,
    seen: SeenImages | None = None,
) -> Dataset:
    """Returns splits and labels, with nothing decoded yet.

    labels: a list that replaces the source's own, which then are the truth, for evaluation and analysis alone. A
    source without labels of its own takes the list's as the truth too.
    val: a source to test on, instead of a split of the source or a tenth of its labelled images.
    seen: what a run has made of the same images before.
    """
    notes = list(source.notes)
    listed = None if labels is None else read_label_list(source, labels)
    if listed is not None and not source.is_labelled:
        source = source.with_labels(listed)
    classes = (*source.classes, *sort_classes({*(() if val is None else val.classes)} - {*source.classes}))
    truth = Labels.from_names(source.train.names, classes)
    label = truth if listed is None else Labels.from_names(listed["train"])
    train = Split(source.train.images, source.train.images.paths, truth.number, label.number)
    provided, origin = _provided_test_split(source, val, notes)
    if provided is None:
        train, test, origin = train_test_split(train, recipe.seed, seen)
        lost = 0 if test is None or listed is None else len(test.labelled)
        if lost:
            notes.append(f"{lost} of {lost + len(train.labelled)} listed labels are of held-out test images")
    else:
        number = Labels.from_names(provided.names, classes).number
        test = Split(provided.images, provided.images.paths, number, number)
        if not len(test.with_truth):
            notes.append("the test images have no labels, so nothing will be evaluated on them")
    if test is not None:  # what is tested on has nothing to teach
        test = replace(test, label=torch.full_like(test.label, UNKNOWN))
    label = _training_labels(Labels(train.label, label.names), recipe, notes)
    train = replace(train, label=label.number)
    groups = {} if recipe.coarse_labels == "none" else read_groups(recipe.coarse_labels)
    return Dataset(source.name, classes, label.names, train, test, origin, tuple(notes), groups=groups)


def train_test_split(images: Split, seed: int, seen: SeenImages | None = None) -> tuple[Split, Split | None, str]:
    """Holds out a tenth of the images with a true class, by a hash; returns train, test and where test comes from.

    A class keeps its last label for training. What a run has held out before stays held out; and where it has held out
    nothing whose class is known now, no image is tested on whose label it was trained with.
    """
    candidates = images.with_truth
    if not len(candidates):
        return images, None, "none: the images have no labels"
    origin = f"of {len(candidates)} labelled images, held out by seed {seed}"
    before = [] if seen is None else [i for i in candidates.tolist() if images.paths[i] in seen.test]
    if before:
        test = torch.tensor(before)
    else:
        labelled: Set[str] = frozenset() if seen is None else seen.labelled
        free = candidates[_where([images.paths[i] not in labelled for i in candidates.tolist()])]
        count = -(-len(candidates) // _TEST_FRACTION)
        chance = uniform(1, seed, _SPLITTING, torch.arange(len(images)))[:, 0]
        test = _keep_a_label(images.label, free[chance[free].argsort(stable=True)[:count]]).sort().values
        origin += "" if seen is None else "; the run has seen them without their labels"
    if not len(test):
        return images, None, "none: each class has but one label"
    index = torch.arange(len(images))
    train = index[~torch.isin(index, test)]
    return images.subset(train), images.subset(test), f"{len(test)} {origin}"


def _keep_a_label(label: Int[Tensor, " n"], chosen: Int[Tensor, " m"]) -> Int[Tensor, " k"]:
    """Returns the chosen images but for one of each class that would have no label left."""
    taken = torch.zeros(len(label), dtype=torch.bool)
    taken[chosen] = True
    left = set(label[~taken].tolist())
    spared: list[int] = []
    for i in reversed(chosen.tolist()):
        name = int(label[i])
        if name in left or name == UNKNOWN:
            spared.append(i)
        left.add(name)
    return torch.tensor(spared[::-1], dtype=torch.int64)


def _provided_test_split(source: Source, val: Source | None, notes: list[str]) -> tuple[SourceSplit | None, str]:
    """Returns the split to test on and where it comes from, or None where it has to be held out."""
    if val is not None:
        split = next(val.splits[name] for name in ("test", "val", "train") if name in val.splits)
        unused = [f"{name} ({len(split)} images)" for name, split in source.splits.items() if name != "train"]
        if unused:
            notes.append(f"--val takes the place of {' and '.join(unused)} of {source.name}")
        return split, f"{len(split)} images of {val.name}"
    present = [name for name in ("test", "val") if name in source.splits]
    if not present:
        return None, ""
    # The test images of a challenge have no labels; then val is what one evaluates on.
    chosen, *aside = sorted(present, key=lambda name: not any(source.splits[name].names))
    notes += [f"{name} with {len(source.splits[name])} images is set aside; {chosen} is evaluated on" for name in aside]
    return source.splits[chosen], f"{len(source.splits[chosen])} images of {chosen}"


def _training_labels(labels: Labels, recipe: Recipe, notes: list[str]) -> Labels:
    """Returns the labels as the recipe wants them: coarser, fewer, noisier."""
    coarse, share, per_class, seed = recipe.coarse_labels, recipe.label_share, recipe.labels_per_class, recipe.seed
    clean = modify_labels(labels, coarse=coarse, share=share, per_class=per_class, seed=seed)
    noisy = modify_labels(clean, noise=recipe.label_noise, seed=seed)
    if recipe.label_noise:
        replaced, known = int((noisy.number != clean.number).sum()), int(clean.known.sum())
        notes.append(f"{replaced} of {known} labels were replaced by noise ({100 * replaced / max(1, known):.2f} %)")
    return noisy


def inference_split(split: SourceSplit, size: int | None = None) -> Split:
    """Returns a split of any source without labels, to be read once.

    size: reads pixels as a run with views of this size sees them that keeps images in memory; None: as they are.
    """
    images: DecodedImages | Images = split.images
    if isinstance(images, ArrayImages):
        images = images.tensor
    elif size is not None:
        images = ResizedImages(split.images, STORED_SCALE * size)
    unknown = torch.full((len(split),), UNKNOWN)
    return Split(images, split.images.paths, unknown, unknown)


def _decode(data: Dataset, recipe: Recipe, size: int, known_broken: Collection[tuple[str, str]] | None) -> Dataset:
    """Decodes what fits into memory, and leaves out or refuses what cannot be read."""
    max_side = STORED_SCALE * size
    keep = recipe.cache == "ram" or (recipe.cache == AUTO and _fits(data, max_side))
    splits: dict[str, Split] = {}
    broken: list[tuple[str, Unreadable]] = []
    for name, split in data.splits():
        if isinstance(split.images, ArrayImages):
            split = replace(split, images=split.images.tensor)
        elif keep or (recipe.skip_broken and known_broken is None):
            split, unreadable = _decode_split(split, max_side, keep)
            broken += [(name, error) for error in unreadable]
        elif known_broken is not None:
            split = split.subset(_where([(name, path) not in known_broken for path in split.paths]))
        splits[name] = split
    if broken and not recipe.skip_broken:
        raise BadInput(unreadable_message([error for _, error in broken]))
    empty = next((name for name, split in splits.items() if not len(split)), None)
    if empty is not None:
        raise BadInput(f"no {empty} image of {data.name} can be read")
    in_memory = all(not isinstance(split.images, Images) for split in splits.values())
    return replace(data, train=splits["train"], test=splits.get("test"), broken=tuple(broken), in_memory=in_memory)


def _decode_split(split: Split, max_side: int, keep: bool) -> tuple[Split, list[Unreadable]]:
    """Returns the split without what cannot be read, and with its pixels, shrunk, if they are to be kept."""
    images = split.images
    assert isinstance(images, Images)

    def decode(i: int) -> Tensor | Unreadable | None:
        try:
            pixels = images.decode(i, max_side)
        except Unreadable as error:
            return error.with_traceback(None)
        return shrink(pixels, max_side) if keep else None

    with ThreadPoolExecutor() as pool:
        tasks = pool.map(decode, range(len(images)))
        decoded = list(track(tasks, "decoding" if keep else "checking", len(images)))
    broken = [result for result in decoded if isinstance(result, Unreadable)]
    if broken:
        split = split.subset(_where([not isinstance(result, Unreadable) for result in decoded]))
    pixels = [result for result in decoded if isinstance(result, Tensor)]
    del decoded
    return (replace(split, images=_stack(pixels)) if keep else split), broken


def _where(mask: Sequence[bool]) -> Int[Tensor, " m"]:
    return torch.tensor(mask, dtype=torch.bool).nonzero()[:, 0]


def _fits(data: Dataset, max_side: int) -> bool:
    """Returns whether all images, decoded and shrunk, take at most half of the memory there is."""
    total = 0.0
    for _, split in data.splits():
        if isinstance(split.images, Images):
            pixels = [h * w * min(1.0, max_side / min(h, w)) ** 2 for h, w in split.images.sample_sizes()]
            total += 3 * len(split) * sum(pixels) / max(1, len(pixels))
    return total <= _MAX_MEMORY_SHARE * available_memory() / World.from_env().local_size  # each process keeps its own


def _stack(pictures: list[Tensor]) -> DecodedImages:
    """Returns one tensor where all have one size; each goes as it is copied, so that memory never holds all twice."""
    if len({picture.shape for picture in pictures}) != 1:
        return pictures
    stacked = torch.empty(len(pictures), *pictures[0].shape, dtype=torch.uint8)
    for i in range(len(pictures)):
        stacked[i], pictures[i] = pictures[i], stacked[:0]
    return stacked
