"""Which images can be seen on the page, and walked through: those that are asked for, and around them as many of their
neighbours as there is room for."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from cmsf.analysis.figures.thumbnails import thumbnail
from cmsf.analysis.projection import projections
from cmsf.data import Dataset, Split
from cmsf.report.contents import Pool, Projection
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track

WALKED = 5
"""How many neighbours an image has on the page."""
_SIDE, _QUALITY = 64, 80
_MAPPED = 12
"""Fewer images are seen at a glance, and UMAP has no use for them."""
_READ_AT_A_TIME = 64

Near = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Everything:
    """All images of a run, training images first, with their features and their nearest training images."""

    data: Dataset
    features: Float[Tensor, "n f"]
    near: Int[Tensor, "n k"]
    similarity: Float[Tensor, "n k"]

    def place(self, image: int) -> tuple[str, Split, int]:
        """The name of its split, the split, and where it is in there."""
        before = len(self.data.train)
        if image < before or self.data.test is None:
            return "train", self.data.train, image
        return "test", self.data.test, image - before


class Album:
    """The images of a page: each has the number in which it was first asked for."""

    def __init__(self, everything: Everything, most: int) -> None:
        self.everything, self.most = everything, most
        self.number: dict[int, int] = {}

    def add(self, image: int) -> int:
        """The number of an image on the page; what is added by name is there even if it is too many."""
        return self.number.setdefault(image, len(self.number))

    def add_around(self, images: Iterable[int]) -> None:
        """Images one after another, each with all of its neighbours, as long as there is room."""
        for image in images:
            wanted = dict.fromkeys([image, *self._nearest(image)])
            new = [one for one in wanted if one not in self.number]
            if len(self.number) + len(new) > self.most:
                return
            for one in new:
                self.add(one)

    def pool(self) -> Pool:
        """All of them, ready for the page."""
        data, images = self.everything.data, list(self.number)
        names = tuple(dict.fromkeys((*data.classes, *data.label_names)))
        places = [self.everything.place(image) for image in images]
        features = self.everything.features[torch.tensor(images)]
        near = list(self._near(features))
        return Pool(
            thumbnail=tuple(_thumbnails(places)),
            path=tuple(split.paths[i] for _, split, i in places),
            split=tuple(name for name, _, _ in places),
            label=tuple(_named(split.label[i], data.label_names, names) for _, split, i in places),
            truth=tuple(_named(split.truth[i], data.classes, names) for _, split, i in places),
            wrong=tuple(_wrong(split.label[i], data.as_label(split.truth[i : i + 1])) for _, split, i in places),
            classes=names,
            near=tuple(nearest for nearest, _ in near),
            exact=tuple(exact for _, exact in near),
            projections=tuple(_projected(features)),
            of=len(self.everything.features),
        )

    def _nearest(self, image: int) -> list[int]:
        return [one for one in self.everything.near[image, :WALKED].tolist() if one != UNKNOWN]

    def _near(self, features: Float[Tensor, "p f"]) -> Iterator[tuple[Near, bool]]:
        """The nearest of all where all of them are on the page; else the nearest training images that are."""
        similarity = features @ features.T
        similarity.fill_diagonal_(-torch.inf)
        similarity[:, torch.tensor(list(self.number)) >= len(self.everything.data.train)] = -torch.inf
        here = similarity.topk(min(WALKED, len(features)), dim=1)
        for line, image in enumerate(self.number):
            nearest = self._nearest(image)
            exact = all(one in self.number for one in nearest)
            if exact:
                found = [self.number[one] for one in nearest]
                alike = self.everything.similarity[image, : len(nearest)].tolist()
            else:
                found, alike = here.indices[line].tolist(), here.values[line].tolist()
            yield tuple((one, s) for one, s in zip(found, alike, strict=True) if s > -torch.inf), exact


def _wrong(label: Tensor, expected: Tensor) -> bool | None:
    return None if UNKNOWN in (int(label), int(expected)) else bool(label != expected)


def _named(number: Tensor, names: Sequence[str], everywhere: Sequence[str]) -> int:
    return UNKNOWN if int(number) == UNKNOWN else everywhere.index(names[int(number)])


def _thumbnails(places: Sequence[tuple[str, Split, int]]) -> list[str]:
    found = [""] * len(places)
    jobs = []
    for name in ("train", "test"):
        mine = [number for number, place in enumerate(places) if place[0] == name]
        jobs += [mine[start : start + _READ_AT_A_TIME] for start in range(0, len(mine), _READ_AT_A_TIME)]
    for job in track(jobs, "thumbnails", len(jobs)):
        split = places[job[0]][1]
        pictures = split.read(torch.tensor([places[number][2] for number in job]), _SIDE)
        for number, picture in zip(job, pictures, strict=True):
            found[number] = _address(picture)
    return found


def _address(picture: Tensor) -> str:
    """A picture as a data: address."""
    image, written = Image.fromarray(thumbnail(picture)), io.BytesIO()
    image.thumbnail((_SIDE, _SIDE))
    image.save(written, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(written.getvalue()).decode()}"


def _projected(features: Float[Tensor, "p f"]) -> Iterator[Projection]:
    if len(features) >= _MAPPED:
        for name, project in projections().items():
            x, y = project(features).T.tolist()
            yield Projection(name, tuple(x), tuple(y))
