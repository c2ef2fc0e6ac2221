"""A report out of nothing: small coloured pictures in a few classes, with all that a page can show."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from cmsf.analysis.label_issues import Suspect
from cmsf.analysis.per_class import ClassReport, ClassRow, Mistaken, Pair
from cmsf.evaluation.metrics import Estimate
from cmsf.report.contents import (
    Gallery,
    GalleryRow,
    ImagePool,
    Item,
    Projection,
    Report,
    ResultTable,
    RunReport,
    Setting,
    Stat,
    Strip,
)
from cmsf.report.plots import INK, PAPER, Plot
from cmsf.utils.constants import UNKNOWN

CLASSES = ("circle", "square", "stripe")
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    '"\' onclick=alert(4) x="',
    "\u202eright to left\u202c",
    "line\u2028ends\u2029here\n",
    "{{ 7 * 7 }}{% raw %}",
    "half \ud800 a letter",
    "&lt;b&gt;",
    "x" * 5000,
)
WRITTEN = "2026-01-02T03:04:05+00:00"
_MIDDLE = ((20, 40), (60, 10), (50, 60))
"""Where each class lies on the map."""


def report(runs: int = 1, images: int = 60, classes: Sequence[str] = CLASSES, live: bool = False) -> Report:
    together = Plot("Comparison", "compute", "Accuracy against compute", "A point a run.", _drawn(_rising))
    return Report(
        tuple(run(f"run {1 + n}", n, images, classes) for n in range(runs)),
        WRITTEN,
        "0.0",
        live,
        (together,) if runs > 1 else (),
    )


def run(name: str, seed: int, images: int, classes: Sequence[str]) -> RunReport:
    """Every fifth image is labelled wrong, and every seventh has no label."""
    pictures = pool(seed, images, classes)
    return RunReport(
        name,
        f"runs/{name}",
        "complete" if seed == 0 else "epoch 3 of 10",
        summary=(Stat("20-nn", f"{80 + seed}.0 %", "untrained 40.0 %"), Stat("Time", "4 min")),
        plots=(
            Plot("Curves", "loss", "Loss", "Mean of each epoch.", _drawn(_falling)),
            Plot("Purity and ranks", "purity", "Purity", "Share of the query's class.", _drawn(_rising)),
        ),
        images=pictures,
        galleries=(Gallery("Constrained", "Three queries.", tuple(_row(pictures, query) for query in range(3))),),
        classes=ClassReport(
            tuple(_class_row(n, classes) for n in range(len(classes))),
            (Pair(classes[0], classes[1], 5, 0.25),),
            left_out=False,
            counts=torch.zeros(len(classes), len(classes), dtype=torch.int64),
        ),
        suspects=tuple(
            (image, _suspect(pictures.path[image], classes[pictures.label[image]], classes[0], 0.9 - n / 10))
            for n, image in enumerate([0, 5, 10, 15, 20, 25])
        ),
        results=(
            ResultTable(
                "knn",
                WRITTEN,
                {"1-nn": Estimate(79.0 + seed, 77.5, 80.5), "20-nn": Estimate(80.0, 79.0, 81.0)},
                {"k": "1, 20"},
            ),
        ),
        compute={"Forward passes": "159,744"},
        recipe=(Setting("batch_size", "64", True), Setting("epochs", "10", False)),
        environment={"torch": "2.15.0"},
        notes=("no test images: no accuracy",),
    )


def pool(seed: int, images: int, classes: Sequence[str]) -> ImagePool:
    noise = np.random.default_rng(seed)
    truth = tuple(image % len(classes) for image in range(images))
    place = np.array([_MIDDLE[number % 3] for number in truth]) + noise.normal(0, 6, (images, 2))
    apart = np.linalg.norm(place[:, None] - place[None], axis=2) + 1e9 * np.eye(images)
    near = np.argsort(apart, axis=1)[:, :5]
    across, along = tuple(map(float, place[:, 0])), tuple(map(float, place[:, 1]))
    return ImagePool(
        thumbnail=tuple(_thumbnail(number % 3, image % 9) for image, number in enumerate(truth)),
        path=tuple(f"{classes[number]}/{image:03}.png" for image, number in enumerate(truth)),
        split=tuple("test" if image % 4 == 0 else "train" for image in range(images)),
        label=tuple(_label(image, number, len(classes)) for image, number in enumerate(truth)),
        truth=truth,
        wrong=tuple(_label(image, number, len(classes)) not in (number, -1) for image, number in enumerate(truth)),
        classes=tuple(classes),
        near=tuple(tuple((int(j), 1 - float(apart[i, j]) / 100) for j in near[i]) for i in range(images)),
        exact=(False,) * images,
        projections=(Projection("PCA", across, along), Projection("UMAP", along, across)),
    )


def hostile_report() -> Report:
    """Whatever comes from data or from files is hostile in it."""
    bad = HOSTILE[0]
    base = report(classes=HOSTILE).runs[0]
    told = tuple((n, _suspect(f"{name}.png", name, HOSTILE[n - 1], 0.5)) for n, name in enumerate(HOSTILE))
    named = replace(
        base,
        name=bad,
        path=f"runs/{bad}",
        state=bad,
        summary=(Stat(bad, bad, bad),),
        suspects=told,
        about_suspects=bad,
        compute={bad: bad},
        recipe=(Setting(bad, bad, False),),
        environment={bad: bad},
        results=(ResultTable(bad, bad, {bad: Estimate(1.0, 0.0, 2.0)}, {bad: bad}),),
        galleries=tuple(replace(gallery, title=bad, caption=bad) for gallery in base.galleries),
        notes=HOSTILE,
    )
    return Report((named, replace(named, name=HOSTILE[1])), bad, bad)


def _class_row(number: int, classes: Sequence[str]) -> ClassRow:
    purity = None if number == 0 else 0.5 + number / 10
    mistaken = (Mistaken(classes[0], 5, 0.05),)
    return ClassRow(classes[number], 100 - number, 10 * number, 100, 0.9 - number / 10, purity, mistaken)


def _suspect(path: str, label: str, suggested: str, score: float) -> Suspect:
    return Suspect(path, 0, label, suggested, score, 0.1, 0.9, ())


def _label(image: int, truth: int, classes: int) -> int:
    if image % 7 == 6:
        return UNKNOWN
    return (truth + 1) % classes if image % 5 == 0 else truth


def _row(pictures: ImagePool, query: int) -> GalleryRow:
    near = [image for image, _ in pictures.near[query]]
    strange = [(image + 1) % len(pictures.path) for image in near]
    right = tuple(Item(image, wrong=pictures.truth[image] != pictures.truth[query]) for image in near)
    wrong = tuple(
        Item(image, 3 + 10 * place, pictures.truth[image] != pictures.truth[query])
        for place, image in enumerate(strange)
    )
    return GalleryRow(query, (Strip("nearest", right), Strip("the same images elsewhere", wrong), Strip("empty", ())))


@cache
def _thumbnail(shape: int, shade: int) -> str:
    grid = np.indices((32, 32)) - 15.5
    inside = (np.hypot(*grid) < 12, np.abs(grid).max(0) < 11, np.abs(grid[0]) % 8 < 4)[shape]
    pixels = np.full((32, 32, 3), 235, np.uint8)
    pixels[inside] = np.roll([40 + 20 * shade, 90, 200 - 15 * shade], shape)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


@cache
def _drawn(draw: Callable[[Axes], None]) -> Figure:
    colours = {
        "text.color": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.facecolor": PAPER,
    }
    with rc_context(colours):
        figure = Figure(figsize=(5, 3), layout="constrained", facecolor=PAPER)
        draw(figure.add_subplot())
    return figure


def _falling(axes: Axes) -> None:
    axes.plot([3, 2, 1], color="#0b7ea3")


def _rising(axes: Axes) -> None:
    axes.plot([1, 2, 3], color="#0b7ea3")
