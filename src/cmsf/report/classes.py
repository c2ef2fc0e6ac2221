"""Which classes are told apart, and which labels their neighbourhoods contradict, for the page."""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.analysis import per_class as analysed
from cmsf.analysis.suspects import find_suspects
from cmsf.errors import BadInput
from cmsf.report.contents import ClassRow, Pair, Suspect
from cmsf.report.pool import Album
from cmsf.rows import UNKNOWN

_PICTURED, _LISTED = 60, 500
"""Of the suspects, the likeliest so many are shown, and so many are listed."""


@dataclass(frozen=True)
class Judged:
    classes: tuple[ClassRow, ...] = ()
    pairs: tuple[Pair, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    notes: tuple[str, ...] = ()


def judge(album: Album) -> Judged:
    """By true classes where they are known, and by the labels that training had; what is missing is in the notes."""
    notes: list[str] = []
    table: analysed.PerClass | None = None
    suspects: tuple[Suspect, ...] = ()
    if bool((album.everything.data.train.truth != UNKNOWN).any()):
        try:
            table = _table(album)
        except BadInput as error:
            notes.append(f"there is no table of classes: {error}")
    else:
        notes.append("no true class is known, so there is no purity and no table of classes")
    try:
        suspects, more = _suspects(album)
        notes += more
    except BadInput as error:
        notes.append(f"labels were not checked: {str(error).split(';')[0]}")
    if table is None:
        return Judged(suspects=suspects, notes=tuple(notes))
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
    pairs = tuple(Pair(pair.first, pair.second, pair.share) for pair in table.pairs)
    return Judged(rows, pairs, suspects, tuple(notes))


def _table(album: Album) -> analysed.PerClass:
    data, features = album.everything.data, album.everything.features
    train, test = features[: len(data.train)], features[len(data.train) :]
    if data.test is None:
        return analysed.per_class(data.classes, train, data.train.truth)
    return analysed.per_class(data.classes, train, data.train.truth, test, data.test.truth)


def _suspects(album: Album) -> tuple[tuple[Suspect, ...], list[str]]:
    data, features = album.everything.data, album.everything.features
    found = find_suspects(lambda labelled: features[: len(data.train)][data.train.labelled], data)
    notes = []
    if len(found) > _LISTED:
        notes.append(
            f"the likeliest {_LISTED} of {len(found)} suspect labels are listed; cmsf suspects writes them all"
        )
    shown = [
        Suspect(
            album.add(one.index) if place < _PICTURED else album.number.get(one.index),
            one.path,
            one.label,
            one.suggested,
            one.score,
        )
        for place, one in enumerate(found[:_LISTED])
    ]
    return tuple(shown), notes
