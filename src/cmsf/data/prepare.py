"""From a source to the data set of a run: splits, labels, and pixels in memory or on the disk."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from cmsf.data.dataset import Dataset, Split
from cmsf.data.decoding import shrink
from cmsf.data.images import ArrayImages, FileImages, Images, Unreadable, unreadable_message
from cmsf.data.labels import Labels, modify_labels, read_groups
from cmsf.data.source import Source, SourceSplit, sort_classes
from cmsf.data.sources.table import match_labels, match_listed
from cmsf.data.transforms import DecodedImages
from cmsf.recipes.recipe import AUTO, Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput
from cmsf.utils.memory import available_memory
from cmsf.utils.progress import track
from cmsf.utils.rng import uniform

STORED_SCALE = 2
"""Decoded photos keep a shorter side of this many times the view: the rest would never be seen."""
_MOST_OF_MEMORY = 0.5
_HELD_OUT_SHARE = 10
_HOLDING_OUT = 0x5917 << 40  # what this use of the hash is for; no epoch is ever so high


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
    """Images to train on at `size`, and to test on, with labels as the recipe and a list of labels say.

    known_broken: splits and paths found unreadable before, so that files need not be checked again.
    seen: what a run has made of the same images before.
    """
    return _read(build_dataset(source, recipe, labels=labels, val=val, seen=seen), recipe, size, known_broken)


@dataclass(frozen=True)
class SeenImages:
    """By path: images that a run was tested on, and images that it was taught the label of."""

    test: Set[str]
    taught: Set[str]


def build_dataset(
    source: Source,
    recipe: Recipe,
    *,
    labels: Path | None = None,
    val: Source | None = None,
    seen: SeenImages | None = None,
) -> Dataset:
    """Splits and labels, nothing decoded yet.

    labels: a list that replaces the source's own, which then are the truth, for evaluation and analysis alone. A
    source without labels of its own takes the list's as the truth too.
    val: a source to test on, instead of a split of the source or a tenth of its labelled images.
    """
    notes = list(source.notes)
    train, test, origin = _train_and_test(source, val, notes)
    given = None if labels is None else read_label_list(source, labels)
    own = any(name is not None for part in source.splits.values() for name in part.names)
    if given is not None and not own:
        source = _with_names(source, given)
        train, test, origin = _train_and_test(source, val, notes=[])
    classes = (*source.classes, *sort_classes({*(() if val is None else val.classes)} - {*source.classes}))
    truth = Labels.from_names(train.names, classes)
    label = truth if given is None else Labels.from_names(given["train"])
    everything = Split(train.images, train.images.paths, truth.number, label.number)
    if test is None:
        everything, held_out, origin = train_test_split(everything, recipe.seed, seen)
        lost = 0 if held_out is None or given is None else len(held_out.labelled)
        if lost:
            notes.append(f"{lost} of {lost + len(everything.labelled)} listed labels are of held-out test images")
    else:
        number = Labels.from_names(test.names, classes).number
        held_out = Split(test.images, test.images.paths, number, number)
        if not len(held_out.with_truth):
            notes.append("the test images have no labels, so nothing will be judged by them")
    if held_out is not None:  # what is tested on has nothing to teach
        held_out = replace(held_out, label=torch.full_like(held_out.label, UNKNOWN))
    clean = modify_labels(
        Labels(everything.label, label.names),
        coarse=recipe.coarse_labels,
        share=recipe.label_share,
        per_class=recipe.labels_per_class,
        seed=recipe.seed,
    )
    label = modify_labels(clean, noise=recipe.label_noise, seed=recipe.seed)
    if recipe.label_noise:
        replaced, known = int((label.number != clean.number).sum()), int(clean.known.sum())
        notes.append(f"{replaced} of {known} labels were replaced by noise ({100 * replaced / max(1, known):.2f} %)")
    everything = replace(everything, label=label.number)
    groups = {} if recipe.coarse_labels == "none" else read_groups(recipe.coarse_labels)
    return Dataset(source.name, classes, label.names, everything, held_out, origin, tuple(notes), groups=groups)


class ResizedImages(Images):
    """Images at the size at which memory keeps them."""

    def __init__(self, images: Images, size: int) -> None:
        self.images, self.paths, self.largest_side = images, images.paths, STORED_SCALE * size

    def open(self, i: int) -> Image.Image:
        return self.images.open(i)

    def decode(self, i: int, enough: int) -> UInt8[Tensor, "3 h w"]:
        return shrink(self.images.decode(i, self.largest_side), self.largest_side)


def inference_split(part: SourceSplit, size: int, cache: str) -> Split:
    """A part of any source, to be read once and in order, its pixels those that a run with this cache would see."""
    if isinstance(part.images, ArrayImages):
        images: DecodedImages | Images = part.images.tensor
    else:
        images = ResizedImages(part.images, size) if cache == "ram" else part.images
    nothing = torch.full((len(part),), UNKNOWN)
    return Split(images, part.images.paths, nothing, nothing)


def train_test_split(everything: Split, seed: int, seen: SeenImages | None = None) -> tuple[Split, Split | None, str]:
    """A tenth of the images with a class becomes the test split, by a hash; others have nothing to be tested by.

    A class keeps its last label for training. What a run has held out before stays held out; and where it has held out
    nothing that can be judged now, no image is tested on whose label it was taught.
    """
    judged = everything.with_truth
    if not len(judged):
        return everything, None, "none: the images have no labels"
    origin = f"of {len(judged)} labelled images, held out by seed {seed}"
    before = [] if seen is None else [i for i in judged.tolist() if everything.paths[i] in seen.test]
    if before:
        test = torch.tensor(before)
    else:
        taught: Set[str] = frozenset() if seen is None else seen.taught
        free = judged[_where([everything.paths[i] not in taught for i in judged.tolist()])]
        count = -(-len(judged) // _HELD_OUT_SHARE)
        chance = uniform(1, seed, _HOLDING_OUT, torch.arange(len(everything)))[:, 0]
        test = _leaving_a_label(everything.label, free[chance[free].argsort(stable=True)[:count]]).sort().values
        origin += "" if seen is None else "; the run has seen them without their labels"
    if not len(test):
        return everything, None, "none: each class has but one label"
    index = torch.arange(len(everything))
    train = index[~torch.isin(index, test)]
    return everything.subset(train), everything.subset(test), f"{len(test)} {origin}"


def _leaving_a_label(label: Int[Tensor, " n"], chosen: Int[Tensor, " m"]) -> Int[Tensor, " k"]:
    """Those of the chosen images that can be spared: of a class with all its labels among them, one is not."""
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


def _train_and_test(
    source: Source, val: Source | None, notes: list[str]
) -> tuple[SourceSplit, SourceSplit | None, str]:
    if val is not None:
        part = next(val.splits[name] for name in ("test", "val", "train") if name in val.splits)
        unused = [f"{name} ({len(part)} images)" for name, part in source.splits.items() if name != "train"]
        if unused:
            notes.append(f"--val takes the place of {' and '.join(unused)} of {source.name}")
        return source.train, part, f"{len(part)} images of {val.name}"
    there = [name for name in ("test", "val") if name in source.splits]
    if not there:
        return source.train, None, ""
    # The test images of a challenge have no labels; then val is what one is judged on.
    chosen, *aside = sorted(there, key=lambda name: not any(source.splits[name].names))
    notes += [f"{name} with {len(source.splits[name])} images is set aside; {chosen} is judged on" for name in aside]
    return source.train, source.splits[chosen], f"{len(source.splits[chosen])} images of {chosen}"


def read_label_list(source: Source, file: Path) -> dict[str, list[str | None]]:
    """What a list says of each part's images."""
    return match_labels(file, *_paths(source))


def read_label_rows(source: Source, file: Path) -> dict[str, dict[int, str | None]]:
    """What a list says of those images of each part that it names, by their places."""
    return match_listed(file, *_paths(source))


def _paths(source: Source) -> tuple[dict[str, Sequence[str]], Path | None]:
    """By part, and the folder that they are relative to, where there is one."""
    images = source.train.images
    paths = {name: part.images.paths for name, part in source.splits.items()}
    return paths, images.root if isinstance(images, FileImages) else None


def _with_names(source: Source, given: dict[str, list[str | None]]) -> Source:
    parts = {name: SourceSplit(part.images, given.get(name, part.names)) for name, part in source.splits.items()}
    return replace(source, splits=parts, classes=sort_classes(name for part in parts.values() for name in part.names))


def _read(data: Dataset, recipe: Recipe, size: int, known_broken: Collection[tuple[str, str]] | None) -> Dataset:
    """Decode what fits into memory, now; find what cannot be read."""
    keep = recipe.cache == "ram" or (recipe.cache == AUTO and _fits(data, STORED_SCALE * size))
    broken: list[tuple[str, Unreadable]] = []
    splits: dict[str, Split] = {}
    for name, split in (("train", data.train), ("test", data.test)):
        if split is None:
            continue
        if known_broken is not None and not keep and not isinstance(split.images, ArrayImages):
            split = split.subset(_where([(name, path) not in known_broken for path in split.paths]))
            found: list[Unreadable] = []
        else:
            split, found = _decoded(split, STORED_SCALE * size, keep=keep, look=keep or recipe.skip_broken)
        splits[name] = split
        broken += [(name, one) for one in found]
    if broken and not recipe.skip_broken:
        raise BadInput(unreadable_message([one for _, one in broken]))
    empty = next((name for name, split in splits.items() if not len(split)), None)
    if empty is not None:
        raise BadInput(f"no {empty} image of {data.name} can be read")
    in_memory = all(not isinstance(split.images, Images) for split in splits.values())
    return replace(data, train=splits["train"], test=splits.get("test"), broken=tuple(broken), in_memory=in_memory)


def _decoded(split: Split, largest_side: int, *, keep: bool, look: bool) -> tuple[Split, list[Unreadable]]:
    """The split with its pixels, if they are to be kept, and without what cannot be read, if one is to look."""
    images = split.images
    assert isinstance(images, Images)
    if isinstance(images, ArrayImages):
        return replace(split, images=images.tensor), []
    if not look:
        return split, []
    found = _decode_all(images, largest_side, keep)
    broken = [one for one in found if isinstance(one, Unreadable)]
    if broken:
        split = split.subset(_where([not isinstance(one, Unreadable) for one in found]))
    kept = [one for one in found if isinstance(one, Tensor)]
    del found
    return (replace(split, images=_together(kept)) if keep else split), broken


def _where(kept: Sequence[bool]) -> Int[Tensor, " m"]:
    return torch.tensor(kept, dtype=torch.bool).nonzero()[:, 0]


def _fits(data: Dataset, largest_side: int) -> bool:
    """Whether all images, decoded and shrunk, take at most half of the memory there is."""
    total = 0.0
    for split in (data.train, data.test):
        if split is not None and isinstance(split.images, Images):
            sizes = SourceSplit(split.images, ()).sample_sizes()
            pixels = [h * w * min(1.0, largest_side / min(h, w)) ** 2 for h, w in sizes]
            total += 3 * len(split) * sum(pixels) / max(1, len(pixels))
    return total <= _MOST_OF_MEMORY * available_memory() / World.from_env().local_size  # each process keeps its own


def _decode_all(images: Images, largest_side: int, keep: bool) -> list[Tensor | Unreadable | None]:
    """Each image decoded and shrunk (None where it is not to be kept), or why it cannot be."""

    def one(i: int) -> Tensor | Unreadable | None:
        try:
            picture = images.decode(i, largest_side)
        except Unreadable as error:
            return error.with_traceback(None)
        return shrink(picture, largest_side) if keep else None

    with ThreadPoolExecutor() as pool:
        return list(track(pool.map(one, range(len(images))), "decoding" if keep else "checking", len(images)))


def _together(pictures: list[Tensor]) -> DecodedImages:
    """One tensor where all have one size; each picture goes as it is copied, so that memory never holds all twice."""
    if len({picture.shape for picture in pictures}) != 1:
        return pictures
    together = torch.empty(len(pictures), *pictures[0].shape, dtype=torch.uint8)
    for i in range(len(pictures)):
        together[i], pictures[i] = pictures[i], together[:0]
    return together
