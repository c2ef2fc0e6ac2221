from dataclasses import replace

import oracle
import pytest
import torch
from helpers import random_rows, unit
from hypothesis import given
from hypothesis import strategies as st

from cmsf.method import search as search_module
from cmsf.method import topk
from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.method.rows import Rows
from cmsf.method.search import search
from cmsf.method.topk import OwnRow, nearest_vectors
from cmsf.utils.constants import UNKNOWN

CONSTRAINTS = {
    "none": (Unconstrained(), oracle.everything),
    "label": (SameLabel(), oracle.same_label),
    "companion": (NearCompanion(4), lambda query, rows: oracle.near_companion(query, rows, 4)),
}


def with_holes(rows: Rows, every: int = 5) -> Rows:
    """Some rows retired, as in a bank that has gone round."""
    gone = torch.arange(len(rows)) % every == 1
    return Rows(rows.embedding, rows.index.masked_fill(gone, UNKNOWN), rows.label, rows.companion)


def queries(rows: Rows, count: int) -> Rows:
    return rows[rows.exists.nonzero()[:count, 0]]


def positions(row: torch.Tensor) -> list[list[int]]:
    return [[j for j in line if j != UNKNOWN] for line in row.tolist()]


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("k", [1, 3, 30])
@pytest.mark.parametrize("include_query", [True, False])
@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_the_search_finds_what_slow_loops_find(name: str, k: int, include_query: bool, unknown: float) -> None:
    constraint, slow = CONSTRAINTS[name]
    for seed in range(5):
        rows = with_holes(random_rows(25, seed, unknown=unknown))
        query = queries(rows, 9)
        found = search(query, rows, constraint, k, include_query)
        expected = oracle.chosen(query, rows, slow(query, rows), k, include_query)
        assert positions(found.row) == expected
        assert found.count.tolist() == [len(line) for line in expected]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 2**31))
def test_the_search_is_a_full_sort_even_where_everything_ties(values: list[int], k: int, seed: int) -> None:
    # Whole numbers tie often and exactly.
    among = torch.tensor(values, dtype=torch.float64)[:, None]
    index = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    allowed = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.8
    nobody = OwnRow(torch.tensor([UNKNOWN]))
    found = nearest_vectors(torch.ones(1, 1, dtype=torch.float64), among, allowed, index, k, nobody)
    order = sorted((j for j in range(len(values)) if allowed[j]), key=lambda j: (-values[j], int(index[j])))
    assert found[0].tolist() == (order + [UNKNOWN] * k)[:k]


@given(
    columns=st.integers(1000, 2500),
    k=st.integers(1, 3),
    kinds=st.sampled_from([2, 30, 10**6]),
    allowed_share=st.sampled_from([0.001, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_ruling_out_groups_of_many_rows_loses_none(
    columns: int, k: int, kinds: int, allowed_share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    among = torch.randint(kinds, (columns, 1), generator=generator).double()
    index = torch.randperm(columns, generator=generator)
    allowed = torch.rand(columns, generator=generator) < allowed_share
    query = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = nearest_vectors(query, among, allowed, index, k, OwnRow(torch.tensor([UNKNOWN, UNKNOWN])))
    for sign, row in zip((1, -1), found.tolist(), strict=True):
        rank = list(zip((-sign * among[:, 0]).tolist(), index.tolist(), strict=True))
        order = sorted(allowed.nonzero()[:, 0].tolist(), key=rank.__getitem__)
        assert row == (order + [UNKNOWN] * k)[:k]


@pytest.mark.parametrize("rows", [1024, 1039])
def test_a_row_is_found_wherever_it_lies(rows: int) -> None:
    # Query j is most like row j, and no two rows tie, so that none is sorted. 1039 rows do not make whole groups.
    alone, rank = torch.eye(rows, dtype=torch.float64), torch.arange(rows, dtype=torch.float64)[:, None] / rows
    query, among = torch.cat([2 * alone, torch.ones_like(rank)], dim=1), torch.cat([alone, rank], dim=1)
    everything, nobody = torch.ones(rows, dtype=torch.bool), OwnRow(torch.full((rows,), UNKNOWN))
    found = nearest_vectors(query, among, everything, torch.arange(rows), 1, nobody)
    assert torch.equal(found[:, 0], torch.arange(rows))


def test_vectors_that_are_being_trained_can_be_searched() -> None:
    vectors = unit(6, 4, 0).requires_grad_()
    everything, nobody = torch.ones(6, dtype=torch.bool), OwnRow(torch.full((6,), UNKNOWN))
    assert nearest_vectors(vectors, vectors, everything, torch.arange(6), 1, nobody)[:, 0].tolist() == list(range(6))


def test_every_query_may_choose_itself_even_among_equals() -> None:
    # Every row is the same vector, so only the rule that a query is its own nearest tells them apart.
    rows = Rows(unit(1, 5, 0).float().expand(12, -1).contiguous(), torch.arange(12))
    found = search(rows, rows, Unconstrained(), 1)
    assert found.row[:, 0].tolist() == list(range(12))


def test_every_query_is_in_its_own_constraint_set() -> None:
    rows = random_rows(30, seed=3, unknown=0.3)
    for constraint, _ in CONSTRAINTS.values():
        found = search(rows, rows, constraint, 1)
        assert found.row[:, 0].tolist() == list(range(30))


def test_fewer_than_k_related_rows_give_just_those() -> None:
    rows = Rows(unit(6, 4, 0), torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 2]))
    found = search(rows, rows, SameLabel(), 4)
    assert found.count.tolist() == [2, 2, 3, 3, 3, 1]
    assert set(found.row[0].tolist()) == {0, 1, UNKNOWN}
    torch.testing.assert_close(found.mean[5], rows.embedding[5])


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("k", [4, None])
def test_permuting_the_bank_changes_nothing(name: str, k: int | None) -> None:
    constraint, _ = CONSTRAINTS[name]
    rows = with_holes(random_rows(40, seed=7, unknown=0.2))
    query = queries(rows, 12)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    here = search(query, rows, constraint, k)
    there = search(query, rows[order], constraint, k)
    torch.testing.assert_close(here.mean, there.mean, rtol=0, atol=1e-14)
    assert here.count.tolist() == there.count.tolist()
    if k is not None:
        assert torch.equal(here.row, torch.where(there.row == UNKNOWN, UNKNOWN, order[there.row]))


@pytest.mark.parametrize("constraint", [Unconstrained(), SameLabel(), NearCompanion(3)])
def test_cutting_the_search_into_blocks_changes_nothing(
    constraint: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(50, seed=2, unknown=0.2)
    whole = search(rows, rows, constraint, 5)
    sizes = ((search_module, "MAX_BLOCK", 120), (topk, "_CACHED", 120), (topk, "_COLUMNS", 7))
    for module, name, size in (*sizes, (search_module, "_GATHERED", 2)):
        monkeypatch.setattr(module, name, size)
        blocks = search(rows, rows, constraint, 5)
        assert torch.equal(whole.row, blocks.row)


@given(columns=st.integers(1, 9), k=st.integers(1, 12), kinds=st.sampled_from([1, 2, 30]), seed=st.integers(0, 2**31))
def test_ties_across_blocks_go_by_image(columns: int, k: int, kinds: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    among = torch.randint(kinds, (40, 1), generator=generator).double()
    index = torch.randperm(40, generator=generator)
    allowed = torch.rand(40, generator=generator) < 0.7
    own = int(torch.randint(40, (1,), generator=generator))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "_COLUMNS", columns)
        query = torch.ones(1, 1, dtype=torch.float64)
        found = nearest_vectors(query, among, allowed, index, k, OwnRow(torch.tensor([own])))
    rank = [(j != own, -float(among[j]), int(index[j])) for j in range(40)]
    order = sorted(allowed.nonzero()[:, 0].tolist(), key=rank.__getitem__)
    assert found[0].tolist() == (order + [UNKNOWN] * k)[:k]


def test_a_column_that_is_not_there_is_asked_for() -> None:
    rows = random_rows(5, seed=0)
    bare = Rows(rows.embedding, rows.index)
    for query, bank in ((rows, bare), (bare, rows)):
        with pytest.raises(ValueError, match="SameLabel needs labels"):
            SameLabel()(query, bank)
        with pytest.raises(ValueError, match="NearCompanion needs companions"):
            NearCompanion(3)(query, bank)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("k", [3, None])
@pytest.mark.parametrize("include_query", [True, False])
def test_what_is_in_rows_that_do_not_exist_never_shows(name: str, k: int | None, include_query: bool) -> None:
    constraint, _ = CONSTRAINTS[name]
    rows = with_holes(random_rows(25, seed=4), every=2)
    query = queries(rows, 6)
    before = search(query, rows, constraint, k, include_query)
    rows.embedding[~rows.exists] = torch.nan
    after = search(query, rows, constraint, k, include_query)
    assert after.mean.isfinite().all()
    torch.testing.assert_close(after.mean, before.mean, rtol=0, atol=0)


def test_a_row_that_is_not_allowed_is_not_chosen_even_by_itself() -> None:
    vectors = unit(6, 4, 0)
    allowed = torch.tensor([False, True, True, True, True, True])
    found = nearest_vectors(vectors[:1], vectors, allowed, torch.arange(6), 6, OwnRow(torch.tensor([0])))
    assert 0 not in found[0].tolist()
    assert found[0, -1] == UNKNOWN


@pytest.mark.parametrize("constraint", [Unconstrained(), SameLabel(), NearCompanion(4), NearCompanion(None)])
@pytest.mark.parametrize("k", [3, None])
def test_an_empty_bank_has_no_neighbours_for_anybody(constraint: Constraint, k: int | None) -> None:
    query = random_rows(5, seed=0)
    for rows in (query[:0], MemoryBank(8, 6, companion_dim=6, dtype=torch.float64).rows()):
        found = search(query, rows, constraint, k, include_query=False)
        assert found.count.tolist() == [0] * 5
        assert not found.mean.any()
        assert (found.row is None) if k is None else (found.row == UNKNOWN).all()
        with pytest.raises(ValueError, match=r"5 of 5 queries .* are not in the bank"):
            search(query, rows, constraint, k)


def test_a_row_of_the_query_under_another_label_rules_out_nobody_else() -> None:
    """A search before the image enters again: its old row has the old label, and is in the C_i of that one alone."""
    rows = Rows(torch.eye(6)[[0, 1, 2, 0, 1, 2]], torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1]))
    query = Rows(torch.eye(6)[[0, 0]], torch.tensor([0, 3]), torch.tensor([1, 1]))  # image 0 was of label 0
    found = search(query, rows, SameLabel(), 3, include_query=False)
    assert found.row[0].tolist() == [3, 4, 5]
    assert found.row[1].tolist() == [4, 5, UNKNOWN]


def test_a_changed_copy_of_a_banks_rows_has_sums_of_its_own() -> None:
    bank = MemoryBank(4, 2)
    rows = Rows(torch.eye(2)[[0, 1, 0, 1]], torch.arange(4), torch.tensor([0, 0, 1, 1]))
    bank.enqueue(rows)
    bank.search(rows, SameLabel(), None)
    changed = replace(bank.rows(), label=torch.tensor([0, 1, 0, 1]))
    assert torch.equal(search(changed, changed, SameLabel(), None).mean, rows.embedding)
