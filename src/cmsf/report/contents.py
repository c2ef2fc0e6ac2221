"""What a page shows, as plain values: the code that collects it knows nothing of HTML, and the page nothing of runs.

A share is between 0 and 1 and shown in per cent. Texts are shown as they are, never as markup: names out of data may
hold anything. What is not known is None, or -1 for an index, and the page leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cmsf.analysis.label_issues import Suspect
from cmsf.analysis.per_class import ClassReport
from cmsf.evaluation.metrics import Estimate
from cmsf.report.plots import EpochLines, Plot
from cmsf.runs.cost import RunCost


@dataclass(frozen=True)
class Stat:
    """A number of a run's summary, formatted, with what to compare it with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Projection:
    """The position of every image of a pool on a map, in any unit."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class ImagePool:
    """The images on the page, by columns; an image is named by its position here.

    thumbnail: data:image/… addresses; the page stores equal ones once, in however many runs they are.
    label, truth: what training was given and what is true, an index into `classes`, or -1.
    wrong: whether the label differs from the truth's label, None where one of them is not known.
    near: the nearest others of each image with their similarity, nearest first, at most five.
    exact: of each image, whether those are the nearest of all training images, and not only of those on the page.
    total: how many images there are in all, on the page or not.
    """

    thumbnail: tuple[str, ...]
    path: tuple[str, ...]
    split: tuple[str, ...]
    label: tuple[int, ...]
    truth: tuple[int, ...]
    wrong: tuple[bool | None, ...]
    classes: tuple[str, ...]
    near: tuple[tuple[tuple[int, float], ...], ...]
    exact: tuple[bool, ...]
    projections: tuple[Projection, ...] = ()
    total: int = 0

    def __post_init__(self) -> None:
        columns = (self.path, self.split, self.label, self.truth, self.wrong, self.near, self.exact)
        places = [axis for projection in self.projections for axis in (projection.x, projection.y)]
        lengths = {len(column) for column in (self.thumbnail, *columns, *places)}
        if len(lengths) > 1:
            raise ValueError(f"the columns of a pool have different lengths: {sorted(lengths)}")


@dataclass(frozen=True)
class Item:
    """An image in a strip.

    rank: its place among the nearest, where that is not its place in the strip.
    wrong: whether its class differs from the query's, None where one of them is not known.
    """

    image: int
    rank: int | None = None
    wrong: bool | None = None


@dataclass(frozen=True)
class Strip:
    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class GalleryRow:
    query: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Gallery:
    title: str
    caption: str
    rows: tuple[GalleryRow, ...]


@dataclass(frozen=True)
class ResultTable:
    """An evaluation as results/*.json has it; accuracies are in per cent."""

    metric: str
    written: str
    figures: Mapping[str, Estimate]
    protocol: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A field of the recipe; default: whether it has the value of the recipe of that name."""

    field: str
    value: str
    default: bool


@dataclass(frozen=True)
class RunReport:
    """A run; what it does not have is empty, and `notes` say why.

    state: "complete", "epoch 3 of 10", …
    answer: what training has made of the weights that it started from, in a sentence.
    suspects: with the position of each in `images`.
    epochs, spent: what it is compared with other runs by; `spent` is None where it cannot be computed.
    """

    name: str
    path: str
    state: str
    answer: str = ""
    summary: tuple[Stat, ...] = ()
    plots: tuple[Plot, ...] = ()
    images: ImagePool | None = None
    galleries: tuple[Gallery, ...] = ()
    classes: ClassReport | None = None
    suspects: tuple[tuple[int, Suspect], ...] = ()
    about_suspects: str = ""
    results: tuple[ResultTable, ...] = ()
    compute: Mapping[str, str] = field(default_factory=dict)
    recipe: tuple[Setting, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    epochs: EpochLines = ()
    spent: RunCost | None = None


@dataclass(frozen=True)
class Report:
    """written: an ISO 8601 time. live: training goes on, and the page looks every 15 seconds for a newer one.

    plots: of several runs together. note: what one has to know to compare them.
    """

    runs: tuple[RunReport, ...]
    written: str
    version: str
    live: bool = False
    plots: tuple[Plot, ...] = ()
    note: str = ""
