"""What a constraint brings near, and what else an analysis is read off, against slow transcriptions."""

import math

import oracle
import pytest
import torch
from helpers import random_rows, unit

from cmsf.analysis.collapse import alignment, uniformity
from cmsf.analysis.far_neighbours import FarNeighbours
from cmsf.analysis.neighbor_graph import build_graph
from cmsf.analysis.projection import pca
from cmsf.evaluation.knn import k_nearest
from cmsf.method.constraints import NearCompanion, SameLabel, Unconstrained
from cmsf.utils.constants import UNKNOWN


def test_neighbours_have_the_ranks_that_a_slow_order_gives_them() -> None:
    rows = random_rows(50, seed=3)
    query, order = rows[:12], oracle.chosen(rows[:12], rows, oracle.everything(rows[:12], rows), None)
    far = FarNeighbours(query, rows)
    nearest = far.in_bank(5)
    assert nearest.image.tolist() == [[int(rows.index[j]) for j in line[1:6]] for line in order]
    assert nearest.rank.tolist() == [[2, 3, 4, 5, 6]] * 12
    for constraint, related in (
        (NearCompanion(8), oracle.near_companion(query, rows, 8)),
        (SameLabel(), oracle.same_label(query, rows)),
    ):
        found = far.constrained(constraint, 4)
        slow = oracle.chosen(query, rows, related, 4, include_query=False)
        for i in range(12):
            there = found.image[i] != UNKNOWN
            assert found.image[i][there].tolist() == [int(rows.index[j]) for j in slow[i]]
            assert found.rank[i][there].tolist() == [1 + order[i].index(j) for j in slow[i]]
            assert (found.rank[i][~there] == UNKNOWN).all()


def test_one_rank_before_is_one_rank_before_and_never_the_query() -> None:
    rows = random_rows(40, seed=4)
    far = FarNeighbours(rows[:10], rows)
    found = far.constrained(NearCompanion(6), 5)
    before = far.one_rank_before(found)
    there = (found.image != UNKNOWN) & (found.rank > 2)
    assert torch.equal(before.rank[there], found.rank[there] - 1)
    assert (before.image[~there] == UNKNOWN).all()
    first = far.one_rank_before(far.constrained(Unconstrained(), 2))
    assert (first.image[:, 0] == UNKNOWN).all()  # before the nearest there is but the query
    assert torch.equal(first.image[:, 1], far.in_bank(1).image[:, 0])


def test_the_older_bank_is_searched_by_companions_and_answers_with_ranks_in_the_newer() -> None:
    rows = random_rows(40, seed=5)
    query = rows[:8]
    assert rows.companion is not None
    far = FarNeighbours(query, rows)
    found = far.in_older_bank(5)
    order = oracle.chosen(query, rows, oracle.everything(query, rows), None)
    for i in range(8):
        alike = (rows.companion @ query.companion[i]).tolist()
        known = [
            j
            for j in range(40)
            if not math.isnan(alike[j]) and int(rows.index[j]) not in (UNKNOWN, int(query.index[i]))
        ]
        slow = sorted(known, key=lambda j: (-alike[j], int(rows.index[j])))[:5]
        assert found.image[i].tolist() == [int(rows.index[j]) for j in slow]
        assert found.rank[i].tolist() == [1 + order[i].index(j) for j in slow]


def test_a_graph_has_every_images_nearest_others_and_an_equal_one_is_another() -> None:
    train, other = unit(30, 6, 0), unit(7, 6, 1)
    train[9] = train[4]
    graph = build_graph(train, other, 5)
    assert graph.row.shape == graph.similarity.shape == (37, 5)
    everything = torch.cat([train, other])
    for i in range(37):
        alike = (train @ everything[i]).tolist()
        slow = sorted((j for j in range(30) if j != i), key=lambda j: (-alike[j], j))[:5]
        assert graph.row[i].tolist() == slow
        assert graph.similarity[i].tolist() == pytest.approx([alike[j] for j in slow])
    assert graph.row[4, 0] == 9
    assert graph.row[9, 0] == 4
    assert build_graph(train[:3], None, 5).row.shape == (3, 2)


@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("share", [0.1, 0.8, 1.0])
def test_a_graph_restricted_to_some_images_is_theirs_or_does_not_reach_so_far(k: int, share: float) -> None:
    train, others = unit(30, 6, 0), unit(7, 6, 1)
    allowed = torch.rand(30, generator=torch.Generator().manual_seed(2)) < share
    mine = train[allowed]
    graph, own = build_graph(train, others, 12), build_graph(mine, others, 40)
    found = graph.among(allowed.nonzero()[:, 0], allowed, k)
    if found is not None:
        assert torch.equal(found.row, own.row[: len(mine), :k])
        torch.testing.assert_close(found.similarity, own.similarity[: len(mine), :k])
    assert (found is None) == (min(k, len(mine) - 1) > int(allowed[graph.row[:30][allowed]].sum(1).min()))
    found = graph.among(torch.arange(30, 37), allowed, k)
    if found is not None:
        (near,) = [row for row, _ in k_nearest(others, mine, k)]
        assert torch.equal(found.row, near)


def test_alignment_and_uniformity_are_those_of_wang_and_isola() -> None:
    first, second = unit(1100, 5, 2), unit(1100, 5, 3)
    assert alignment(first, second) == pytest.approx(
        sum(float((a - b).square().sum()) for a, b in zip(first, second, strict=True)) / 1100
    )
    few = first[:40]
    pairs = [float((a - b).square().sum()) for i, a in enumerate(few) for j, b in enumerate(few) if i != j]
    assert uniformity(few) == pytest.approx(math.log(sum(math.exp(-2 * apart) for apart in pairs) / len(pairs)))
    assert uniformity(first) == pytest.approx(float(torch.pdist(first).square().mul(-2).exp().mean().log()))
    assert uniformity(few[:1].repeat(5, 1)) == pytest.approx(0)
    assert math.isnan(uniformity(few[:1]))


def test_the_main_directions_are_those_of_the_greatest_variance_with_a_sign_of_their_own() -> None:
    spread = torch.randn(200, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64))[0]
    features = spread * torch.tensor([0.1, 3.0, 0.2, 1.0]) @ turn
    placed = pca(features).double()
    assert placed.var(0).tolist() == pytest.approx(
        torch.linalg.eigvalsh(features.T.cov()).flip(0)[:2].tolist(), rel=1e-4
    )
    torch.testing.assert_close(pca(features.flip(0)).double(), placed.flip(0), rtol=1e-5, atol=1e-5)
    assert pca(features[:, :1]).shape == (200, 2)
