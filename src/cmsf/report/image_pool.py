"""Selects the images of a page: those that are shown somewhere, and around them as many neighbours as there is room."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cmsf.analysis.figures.thumbnails import thumbnail
from cmsf.analysis.label_issues import KNN
from cmsf.analysis.neighbor_graph import NeighborGraph, build_graph
from cmsf.analysis.projection import projections
from cmsf.data import Dataset, Split
from cmsf.report.contents import ImagePool, Projection
from cmsf.report.plots import Plot, scatter_plot
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.progress import track

NEIGHBOURS = 5
"""Of an image on the page."""
_SIDE, _QUALITY = 64, 80
_FEWEST_MAPPED = 12
"""Fewer images are seen at a glance, and UMAP needs more."""
_READ_AT_A_TIME = 64

Near = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EmbeddedImages:
    """All images of a run, training images first, with their features and their nearest training images."""

    data: Dataset
    features: Float[Tensor, "n f"]
    graph: NeighborGraph

    @classmethod
    def with_neighbours(
        cls, data: Dataset, train: Float[Tensor, "n f"], test: Float[Tensor, "m f"] | None
    ) -> EmbeddedImages:
        """Searches the features once, for as many neighbours as any part of the page asks for."""
        features = train if test is None else torch.cat([train, test])
        return cls(data, features, build_graph(train, test, KNN.k))

    @property
    def train(self) -> Float[Tensor, "n f"]:
        return self.features[: len(self.data.train)]

    @property
    def test(self) -> Float[Tensor, "m f"]:
        return self.features[len(self.data.train) :]

    def nearest(self, image: int) -> list[int]:
        """Returns the neighbours that the page shows."""
        return [near for near in self.graph.row[image, :NEIGHBOURS].tolist() if near != UNKNOWN]

    def locate(self, image: int) -> tuple[str, Split, int]:
        """Returns the name of its split, the split, and its position there."""
        before = len(self.data.train)
        if image < before or self.data.test is None:
            return "train", self.data.train, image
        return "test", self.data.test, image - before


class PoolBuilder:
    """Numbers the images of a page in the order in which they are added."""

    def __init__(self, images: EmbeddedImages, max_images: int) -> None:
        self.images, self.max_images = images, max_images
        self.number: dict[int, int] = {}

    def add(self, image: int) -> int:
        """Returns the number of an image on the page, where it is from now on, even beyond `max_images`."""
        return self.number.setdefault(image, len(self.number))

    def add_with_neighbours(self, images: Iterable[int]) -> None:
        """Adds images one after another, each with all of its neighbours, as long as there is room."""
        for image in images:
            new = [near for near in dict.fromkeys([image, *self.images.nearest(image)]) if near not in self.number]
            if len(self.number) + len(new) > self.max_images:
                return
            for near in new:
                self.add(near)

    def build(self) -> ImagePool:
        data, images = self.images.data, list(self.number)
        names = tuple(dict.fromkeys((*data.classes, *data.label_names)))
        places = [self.images.locate(image) for image in images]
        features = self.images.features[torch.tensor(images)]
        near = list(self._near(features))
        return ImagePool(
            thumbnail=tuple(_thumbnails(places)),
            path=tuple(split.paths[i] for _, split, i in places),
            split=tuple(name for name, _, _ in places),
            label=tuple(_renumber(split.label[i], data.label_names, names) for _, split, i in places),
            truth=tuple(_renumber(split.truth[i], data.classes, names) for _, split, i in places),
            wrong=tuple(differ(split.label[i], data.as_label(split.truth[i : i + 1])) for _, split, i in places),
            classes=names,
            near=tuple(nearest for nearest, _ in near),
            exact=tuple(exact for _, exact in near),
            projections=tuple(_project(features)),
            total=len(self.images.features),
        )

    def _near(self, features: Float[Tensor, "p f"]) -> Iterator[tuple[Near, bool]]:
        """Yields the nearest of all where all of them are on the page; else the nearest training images that are."""
        similarity = features @ features.T
        similarity.fill_diagonal_(-torch.inf)
        similarity[:, torch.tensor(list(self.number)) >= len(self.images.data.train)] = -torch.inf
        on_page = similarity.topk(min(NEIGHBOURS, len(features)), dim=1)
        for line, image in enumerate(self.number):
            nearest = self.images.nearest(image)
            exact = all(near in self.number for near in nearest)
            if exact:
                numbers = [self.number[near] for near in nearest]
                similarities = self.images.graph.similarity[image, : len(nearest)].tolist()
            else:
                numbers, similarities = on_page.indices[line].tolist(), on_page.values[line].tolist()
            pairs = zip(numbers, similarities, strict=True)
            yield tuple((number, cosine) for number, cosine in pairs if cosine > -torch.inf), exact


def map_plots(pool: ImagePool) -> Iterator[Plot]:
    """Yields the map as files; on the page it is another, which can be moved and clicked."""
    known = [truth if truth >= 0 else label for truth, label in zip(pool.truth, pool.label, strict=True)]
    for projection in pool.projections:
        figure = scatter_plot(projection.x, projection.y, known, pool.classes)
        title = f"Map of the images, by {projection.name}"
        yield Plot("Map", f"map-{projection.name.lower()}", title, "", figure)


def differ(label: Tensor, other: Tensor) -> bool | None:
    """Returns whether two classes differ; None where one of them is not known."""
    return None if UNKNOWN in (int(label), int(other)) else bool(label != other)


def _renumber(label: Tensor, names: Sequence[str], all_names: Sequence[str]) -> int:
    return UNKNOWN if int(label) == UNKNOWN else all_names.index(names[int(label)])


def _thumbnails(places: Sequence[tuple[str, Split, int]]) -> list[str]:
    """Returns data: addresses; images of a split are read some at a time."""
    addresses = [""] * len(places)
    jobs = []
    for name in ("train", "test"):
        members = [number for number, place in enumerate(places) if place[0] == name]
        jobs += [members[start : start + _READ_AT_A_TIME] for start in range(0, len(members), _READ_AT_A_TIME)]
    for job in track(jobs, "thumbnails", len(places), _READ_AT_A_TIME):
        split = places[job[0]][1]
        pictures = split.read(torch.tensor([places[number][2] for number in job]), _SIDE)
        for number, picture in zip(job, pictures, strict=True):
            image, written = Image.fromarray(thumbnail(picture)), io.BytesIO()
            image.thumbnail((_SIDE, _SIDE))
            image.save(written, "WEBP", quality=_QUALITY)
            addresses[number] = f"data:image/webp;base64,{base64.b64encode(written.getvalue()).decode()}"
    return addresses


def _project(features: Float[Tensor, "p f"]) -> Iterator[Projection]:
    if len(features) >= _FEWEST_MAPPED:
        installed = projections()
        for name, project in track(installed.items(), "map", len(installed)):
            x, y = project(features).T.tolist()
            yield Projection(name, tuple(x), tuple(y))
