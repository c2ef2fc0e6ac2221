"""What stands on the page, as plain values: who gathers it knows nothing of HTML, and the page knows nothing of runs.

A share is between 0 and 1 and shown in per cent. Texts are shown as they are, never as markup: names out of data may
hold anything. What is not known is None, or -1 where an index is asked for, and the page leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number that sums a run up, written out, with what it is to be compared with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A drawing by matplotlib, its texts left as text (svg.fonttype "none").

    What is INK or PAPER in it follows the page from light to dark; other colours should be seen on both.

    section: the heading it stands under, with the other plots of that heading.
    """

    section: str
    name: str
    title: str
    caption: str
    svg: str


INK, PAPER = "#24292f", "#ffffff"


@dataclass(frozen=True)
class Projection:
    """Where every image of a pool lies on a map, in any unit."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Pool:
    """The images that can be seen on the page, and walked through; they are named by their position here.

    thumbnail: data:image/… addresses; the same one is stored once, in however many runs it is.
    label: what training was told, truth: what is so, both an index into `classes`, or -1.
    near: the nearest others of each image with their similarity, nearest first, at most five.
    wrong: whether the label is another than the truth has by its group, None where one of them is not known.
    of: how many images there are in all, on the page or not.
    exact: of each image, whether those are the nearest of all training images, and not only of those on the page.
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
    of: int = 0

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
    wrong: whether its class is another than the query's, None where one of them is not known.
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
class ClassRow:
    """How many images a class has and how they fare; `taken_for` are other classes with their share, largest first."""

    name: str
    train: int | None = None
    test: int | None = None
    accuracy: float | None = None
    purity: float | None = None
    taken_for: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Pair:
    """Of the judged images of two classes, how many are taken for the other of them, and which share that is."""

    first: str
    second: str
    images: int
    share: float


@dataclass(frozen=True)
class Suspect:
    """A label that its neighbourhood contradicts."""

    image: int
    path: str
    label: str
    suggested: str
    score: float


@dataclass(frozen=True)
class Measure:
    """A figure of an evaluation with its interval, as results/*.json has them: accuracies are in per cent there."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ResultTable:
    metric: str
    written: str
    figures: tuple[Measure, ...]
    protocol: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Setting:
    """A field of the recipe; `default` where it is what the recipe has by its name."""

    field: str
    value: str
    default: bool


@dataclass(frozen=True)
class RunReport:
    """A run; what it does not have is empty, and `notes` say why.

    state: "complete", "epoch 3 of 10", …
    """

    name: str
    path: str
    state: str
    summary: tuple[Figure, ...] = ()
    plots: tuple[Plot, ...] = ()
    images: Pool | None = None
    galleries: tuple[Gallery, ...] = ()
    classes: tuple[ClassRow, ...] = ()
    pairs: tuple[Pair, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    about_suspects: str = ""
    results: tuple[ResultTable, ...] = ()
    compute: tuple[tuple[str, str], ...] = ()
    recipe: tuple[Setting, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """written: an ISO 8601 time. live: training goes on, and the page looks every 15 seconds for a newer one.

    plots: of several runs together. note: what has to be known to compare them.
    """

    runs: tuple[RunReport, ...]
    written: str
    version: str
    live: bool = False
    plots: tuple[Plot, ...] = ()
    note: str = ""
