import oracle
import pytest
import torch
from helpers import bank_of, random_rows

from cmsf.analysis.collapse import spread
from cmsf.analysis.neighbourhood import histogram, neighbourhood_stats, purity
from cmsf.method.constraints import NearCompanion, SameLabel, Unconstrained
from cmsf.method.rows import Rows
from cmsf.utils.constants import UNKNOWN

TRUTH = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))


def slow_purity(query: Rows, rows: Rows, sets: list[list[int]]) -> float:
    shares = []
    for i, neighbours in enumerate(sets):
        others = [int(rows.index[j]) for j in neighbours if int(rows.index[j]) != int(query.index[i])]
        if others:
            shares.append(sum(TRUTH[j] == TRUTH[query.index[i]] for j in others) / len(others))
    return float(sum(shares) / len(shares))


@pytest.mark.parametrize("k", [5, 40, None])
@pytest.mark.parametrize("include_query", [True, False])
def test_purity_and_rank_equal_slow_counts(k: int | None, include_query: bool) -> None:
    rows = random_rows(60, seed=0)
    query = rows[:20]
    for constraint, related in (
        (NearCompanion(8), oracle.near_companion(query, rows, 8)),
        (SameLabel(), oracle.same_label(query, rows)),
    ):
        sets = oracle.chosen(query, rows, related, k, include_query)
        bank = bank_of(rows)
        chosen = bank.search(query, constraint, k, include_query)
        seen = neighbourhood_stats(query, bank, constraint, chosen, TRUTH, include_query)
        everywhere = oracle.chosen(query, rows, oracle.everything(query, rows), None, include_query)
        as_many = [line[: len(neighbours)] for line, neighbours in zip(everywhere, sets, strict=True)]
        assert float(seen.constrained.nanmean()) == pytest.approx(slow_purity(query, rows, sets))
        assert float(seen.unconstrained.nanmean()) == pytest.approx(slow_purity(query, rows, as_many))
        ordered = oracle.chosen(query, rows, oracle.everything(query, rows), None)
        assert seen.rank.tolist() == [1 + ordered[i].index(sets[i][-1]) for i in range(20)]
        if k is None:
            assert seen.as_far.isnan().all()
        else:
            middle = sorted(seen.rank.tolist())[9]
            as_far = [line[:middle] for line in ordered]
            assert float(seen.as_far.nanmean()) == pytest.approx(slow_purity(query, rows, as_far))


def test_rank_counts_from_one_for_the_query_itself() -> None:
    rows = random_rows(30, seed=1)
    bank = bank_of(rows)
    assert bank.rank(rows, torch.arange(30)).tolist() == [1] * 30
    fifth = torch.tensor([line[4] for line in oracle.chosen(rows, rows, oracle.everything(rows, rows), 5)])
    assert bank.rank(rows, fifth).tolist() == [5] * 30


def test_without_a_constraint_the_last_neighbour_has_rank_k() -> None:
    rows = random_rows(30, seed=1)
    bank = bank_of(rows)
    seen = neighbourhood_stats(rows, bank, Unconstrained(), bank.search(rows, Unconstrained(), 5), TRUTH)
    assert seen.rank.tolist() == [5] * 30
    assert torch.equal(seen.constrained, seen.unconstrained)


def test_purity_leaves_out_the_query_and_whatever_has_no_known_class() -> None:
    rows = Rows(torch.eye(4, dtype=torch.float64), torch.arange(4))
    row = torch.tensor([[0, 1, 2, 3], [1, UNKNOWN, UNKNOWN, UNKNOWN]])
    truth = torch.tensor([0, 0, 1, UNKNOWN])
    assert float(purity(rows[:2], rows.index, row, truth)[0]) == 0.5
    assert purity(rows[:2], rows.index, row, truth)[1].isnan()
    assert purity(rows[:2], rows.index, row, torch.full((4,), UNKNOWN)).isnan().all()


def test_the_histogram_counts_ranks_to_a_hundred() -> None:
    counted = histogram(torch.tensor([1, 5, 5, 100, 101, 5000]))
    assert len(counted) == 100
    assert (counted[0], counted[4], counted[99], sum(counted)) == (1, 2, 1, 4)


def test_spread_is_zero_for_a_collapse_and_one_all_over_the_sphere() -> None:
    assert spread(torch.ones(100, 16) / 4) == pytest.approx(0, abs=1e-6)
    everywhere = torch.nn.functional.normalize(
        torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0)), dim=1
    )
    assert spread(everywhere) == pytest.approx(1, abs=0.01)
