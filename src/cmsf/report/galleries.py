"""Strips of neighbours for the page: of test images, and in a run's own bank with and without its constraint."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from cmsf.analysis.far_neighbours import FarNeighbours, Ranked
from cmsf.analysis.figures.gallery import one_a_class_in_turn
from cmsf.method.learner import Learner
from cmsf.method.losses import Watched
from cmsf.method.rows import Rows
from cmsf.report.contents import Gallery, GalleryRow, Item, Strip
from cmsf.report.image_pool import WALKED, Album
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.rng import permutation

ROWS = 12
_CHOOSING = 0xFA12 << 40  # what this use of the hash is for; no epoch is ever so high


def of_test_images(album: Album, seed: int) -> Gallery:
    """The nearest training images of some test images, or of training images where there is no test."""
    data = album.everything.data
    split, before = (data.train, 0) if data.test is None else (data.test, len(data.train))
    rows = []
    for i in one_a_class_in_turn(split, seed)[:ROWS].tolist():
        near = [one for one in album.everything.near[before + i, :WALKED].tolist() if one != UNKNOWN]
        items = tuple(Item(album.add(one), wrong=_differ(split.truth[i], data.train.truth[one])) for one in near)
        rows.append(GalleryRow(album.add(before + i), (Strip("nearest training images", items),)))
    kind = "Training images" if data.test is None else "Test images"
    caption = "By what was learned (pooled features of the backbone); wrong ones are marked."
    return Gallery(f"{kind} and their nearest training images", caption, tuple(rows))


def of_bank(album: Album, learner: Learner, seed: int) -> list[Gallery]:
    """What the constraint brings near in the run's bank, and what lies as near without it."""
    watched, rows = learner.objective.watched, learner.bank.rows()
    query = known_rows(rows, seed, ROWS)
    if watched is None or not learner.objective.chooses or not len(query):
        return []
    far = FarNeighbours(query, rows)
    return [_selection(album, far, watched), *([_older(album, far)] if rows.companion is not None else [])]


def known_rows(rows: Rows, seed: int, most: int) -> Rows:
    """Some rows of a bank that something is known of, so that a constraint has a say."""
    known = rows.exists if rows.companion is None else rows.exists & rows.has_companion
    place = known.nonzero()[:, 0]
    return rows[place[permutation(len(place), seed, _CHOOSING)][:most]]


def _selection(album: Album, far: FarNeighbours, watched: Watched) -> Gallery:
    constrained = far.constrained(watched.constraint, WALKED)
    strips = {
        "nearest in C, with their ranks in M": constrained,
        "in M, one rank before each": far.one_rank_before(constrained),
        "nearest in M": far.in_bank(WALKED),
    }
    caption = (
        "Rows of the memory bank as queries. C's neighbours may be far out in M and yet be related; what lies one rank "
        "before each of them shows what going as far without a constraint would bring."
    )
    return _gallery(album, far.query, "Neighbours in the constrained set", caption, strips)


def _older(album: Album, far: FarNeighbours) -> Gallery:
    strips = {"nearest in M′, with their ranks in M": far.in_older_bank(WALKED), "nearest in M": far.in_bank(WALKED)}
    caption = (
        "M′ holds another augmentation of the same images, from the epoch before; ranks are those of the images in M."
    )
    return _gallery(album, far.query, "Neighbours in the older bank", caption, strips)


def _gallery(album: Album, query: Rows, title: str, caption: str, strips: dict[str, Ranked]) -> Gallery:
    truth, rows = album.everything.data.train.truth, []
    for line, image in enumerate(query.index.tolist()):
        found = (
            Strip(name, _items(album, truth, image, ranked.image[line], ranked.rank[line]))
            for name, ranked in strips.items()
        )
        rows.append(GalleryRow(album.add(image), tuple(found)))
    return Gallery(title, caption, tuple(rows))


def _items(
    album: Album, truth: Int[Tensor, " n"], query: int, image: Int[Tensor, " k"], rank: Int[Tensor, " k"]
) -> tuple[Item, ...]:
    pairs = zip(image.tolist(), rank.tolist(), strict=True)
    return tuple(
        Item(album.add(one), place, _differ(truth[query], truth[one])) for one, place in pairs if one != UNKNOWN
    )


def _differ(mine: Tensor, theirs: Tensor) -> bool | None:
    return None if UNKNOWN in (int(mine), int(theirs)) else bool(mine != theirs)
