"""Which classes are told apart, and which labels their neighbourhoods contradict, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cmsf.analysis import per_class as analysed
from cmsf.analysis.figures.confusion import confusion_figure
from cmsf.analysis.label_issues import LEAST, against_truth, find_suspects
from cmsf.report.contents import ClassRow, Pair, Suspect
from cmsf.report.image_pool import Album
from cmsf.report.plots import Drawing, styled
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

CONFUSED, _CELLS = "What is taken for what", 60
"""A heading, and the most classes that a matrix of them is readable with."""
_LISTED, _SHARE = 300, 4
"""Of the suspects, so many at most are shown, and no more than a quarter of the page's pictures."""


@dataclass(frozen=True)
class Judged:
    classes: tuple[ClassRow, ...] = ()
    pairs: tuple[Pair, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    about_suspects: str = ""
    notes: tuple[str, ...] = ()
    confusion: Drawing | None = None


def judge(album: Album) -> Judged:
    """By true classes where they are known, and by the labels that training had; what is missing is in the notes."""
    notes: list[str] = []
    table: analysed.PerClass | None = None
    suspects: tuple[Suspect, ...] = ()
    about = ""
    if bool((album.everything.data.train.truth != UNKNOWN).any()):
        try:
            table = _table(album)
        except BadInput as error:
            notes.append(f"there is no table of classes: {error}")
    else:
        notes.append("no true class is known, so there is no purity and no table of classes")
    try:
        suspects, about = _suspects(album)
    except BadInput as error:
        notes.append(f"labels were not checked: {str(error).split(';')[0]}")
    if table is None:
        return Judged(suspects=suspects, about_suspects=about, notes=tuple(notes))
    rows = tuple(
        ClassRow(
            row.name,
            row.train,
            None if table.left_out else row.test,
            row.accuracy,
            row.purity,
            tuple((taken.name, taken.share) for taken in row.taken_for),
        )
        for row in table.rows
    )
    if table.left_out:
        notes.append("no test image has a known class, so each training image is judged by all the others")
    pairs = tuple(Pair(pair.first, pair.second, pair.images, pair.share) for pair in table.pairs)
    return Judged(rows, pairs, suspects, about, tuple(notes), _confusion(table, album.everything.data.classes))


def _table(album: Album) -> analysed.PerClass:
    data, features = album.everything.data, album.everything.features
    train, test = features[: len(data.train)], features[len(data.train) :]
    if data.test is None:
        return analysed.per_class(data.classes, train, data.train.truth)
    return analysed.per_class(data.classes, train, data.train.truth, test, data.test.truth)


def _confusion(table: analysed.PerClass, names: Sequence[str]) -> Drawing | None:
    if not 1 < len(names) <= _CELLS:
        return None
    judged = "training images, each by all the others" if table.left_out else "test images"
    with styled():
        figure = confusion_figure(table.counts, names)
    caption = (
        f"By the vote of the 20 nearest training images; {int(table.counts.sum()):,} {judged}, % of each true class."
    )
    return Drawing(CONFUSED, "confusion", "True classes and what they are taken for", caption, figure)


def _suspects(album: Album) -> tuple[tuple[Suspect, ...], str]:
    """The likeliest ones, and how many there are in all."""
    data, features = album.everything.data, album.everything.features
    every = find_suspects(lambda labelled: features[: len(data.train)][data.train.labelled], data, least=0.0)
    found = [one for one in every if one.score >= LEAST]
    listed = found[: min(_LISTED, album.most // _SHARE)]
    about = (
        f"{len(found):,} of {len(every):,} labels have a score of {LEAST:g} or above: another class has nine times "
        "their vote."
    )
    if len(listed) < len(found):
        about += f" The likeliest {len(listed)} are here; cmsf suspects writes them all."
    hits = against_truth(every, LEAST)
    if hits is not None:
        about += (
            f" By the truth {hits.wrong:,} labels are wrong: {100 * hits.precision:.1f} % of the suspects are "
            f"(precision), and {100 * hits.recall:.1f} % of the wrong ones are suspects (recall)."
        )
    return tuple(Suspect(album.add(one.index), one.path, one.label, one.suggested, one.score) for one in listed), about
