"""Galleries of neighbours: of test images, and in a run's own bank with and without its constraint."""

from __future__ import annotations

from cmsf.analysis.far_neighbours import FarNeighbours, RankedImages
from cmsf.analysis.figures.gallery import one_a_class_in_turn
from cmsf.method.learner import Learner
from cmsf.method.losses import LoggedSearch
from cmsf.method.rows import Rows
from cmsf.report.contents import Gallery, GalleryRow, Item, Strip
from cmsf.report.image_pool import NEIGHBOURS, PoolBuilder, differ
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.rng import permutation

_ROWS = 12
_SAMPLING = 0xFA12 << 40  # what this use of the hash is for; no epoch is ever so high


def feature_gallery(pool: PoolBuilder, seed: int) -> Gallery:
    """Returns the nearest training images of some test images, or of training images where there is no test split."""
    data = pool.images.data
    split, before = (data.train, 0) if data.test is None else (data.test, len(data.train))
    rows = []
    for i in one_a_class_in_turn(split, seed)[:_ROWS].tolist():
        near = pool.images.nearest(before + i)
        items = tuple(Item(pool.add(image), wrong=differ(split.truth[i], data.train.truth[image])) for image in near)
        rows.append(GalleryRow(pool.add(before + i), (Strip("nearest training images", items),)))
    kind = "Training images" if data.test is None else "Test images"
    caption = "By what was learned (pooled features of the backbone); wrong ones are marked."
    return Gallery(f"{kind} and their nearest training images", caption, tuple(rows))


def bank_galleries(pool: PoolBuilder, learner: Learner, seed: int) -> list[Gallery]:
    """Returns what the constraint brings near in the run's bank, and what lies as near without it."""
    search, rows = learner.loss_fn.logged_search, learner.bank.rows()
    query = sample_rows(rows, seed, _ROWS)
    if search is None or not learner.loss_fn.selects_neighbours or not len(query):
        return []
    far = FarNeighbours(query, rows)
    return [_selection(pool, far, search), *([_older_bank(pool, far)] if rows.companion is not None else [])]


def sample_rows(rows: Rows, seed: int, count: int) -> Rows:
    """Returns some rows of a bank that have a companion if any has, so that the constraint excludes something."""
    known = rows.exists if rows.companion is None else rows.exists & rows.has_companion
    place = known.nonzero()[:, 0]
    return rows[place[permutation(len(place), seed, _SAMPLING)][:count]]


def _selection(pool: PoolBuilder, far: FarNeighbours, search: LoggedSearch) -> Gallery:
    constrained = far.constrained(search.constraint, NEIGHBOURS)
    strips = {
        "nearest in C, with their ranks in M": constrained,
        "in M, one rank before each": far.one_rank_before(constrained),
        "nearest in M": far.in_bank(NEIGHBOURS),
    }
    caption = (
        "Rows of the memory bank as queries. C's neighbours may be far out in M and yet be related; what lies one rank "
        "before each of them shows what going as far without a constraint would bring."
    )
    return _gallery(pool, far.query, "Neighbours in the constrained set", caption, strips)


def _older_bank(pool: PoolBuilder, far: FarNeighbours) -> Gallery:
    strips = {
        "nearest in M′, with their ranks in M": far.in_older_bank(NEIGHBOURS),
        "nearest in M": far.in_bank(NEIGHBOURS),
    }
    caption = (
        "M′ holds another augmentation of the same images, from the epoch before; ranks are those of the images in M."
    )
    return _gallery(pool, far.query, "Neighbours in the older bank", caption, strips)


def _gallery(pool: PoolBuilder, query: Rows, title: str, caption: str, strips: dict[str, RankedImages]) -> Gallery:
    truth, rows = pool.images.data.train.truth, []
    for line, own in enumerate(query.index.tolist()):
        number, drawn = pool.add(own), []
        for name, ranked in strips.items():
            pairs = zip(ranked.image[line].tolist(), ranked.rank[line].tolist(), strict=True)
            items = [
                Item(pool.add(image), rank, differ(truth[own], truth[image]))
                for image, rank in pairs
                if image != UNKNOWN
            ]
            drawn.append(Strip(name, tuple(items)))
        rows.append(GalleryRow(number, tuple(drawn)))
    return Gallery(title, caption, tuple(rows))
