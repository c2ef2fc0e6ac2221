import oracle
import pytest
import torch
from helpers import bank_of, random_rows, unit

import cmsf
from cmsf.method.bank import MemoryBank
from cmsf.method.constraints import NearCompanion, SameLabel, Unconstrained
from cmsf.method.losses import EXTRA, SECOND, LossInput, MeanShift, Term, constrained_mean_shift
from cmsf.method.rows import Rows
from cmsf.models.encoders import EncoderOutput

MODES = {
    "byol": (Unconstrained(), oracle.everything, 1),
    "msf": (Unconstrained(), oracle.everything, 5),
    "self": (NearCompanion(5), lambda q, r: oracle.near_companion(q, r, 5), 5),
    "self, k below k'": (NearCompanion(10), lambda q, r: oracle.near_companion(q, r, 10), 5),
    "sup": (SameLabel(), oracle.same_label, 10),
    "sup all": (SameLabel(), oracle.same_label, None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("include_query", [True, False])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_loss_and_gradient_equal_the_papers_loops(mode: str, include_query: bool, unknown: float) -> None:
    constraint, slow, k = MODES[mode]
    for seed in range(4):
        rows = random_rows(32, seed, unknown=unknown)
        query = rows[torch.arange(20, 32)]
        fast, plain = (unit(12, 6, seed + 50).requires_grad_() for _ in range(2))
        loss, _ = constrained_mean_shift(fast, query, rows, constraint, k, include_query)
        expected = oracle.loss(plain, rows, oracle.chosen(query, rows, slow(query, rows), k, include_query))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(fast.grad, plain.grad, rtol=0, atol=1e-13)


def test_k_of_one_is_byol() -> None:
    rows = random_rows(30, seed=0)
    query, prediction = rows[:8], unit(8, 6, 9)
    for constraint in (Unconstrained(), SameLabel(), NearCompanion(5)):
        loss, neighbours = constrained_mean_shift(prediction, query, rows, constraint, k=1)
        assert neighbours.row[:, 0].tolist() == list(range(8))
        torch.testing.assert_close(loss, (prediction - query.embedding).square().sum(1).mean())


def test_a_constraint_as_wide_as_the_bank_is_mean_shift_once_every_row_has_a_companion() -> None:
    rows = random_rows(40, seed=1)
    query, prediction = rows[:10], unit(10, 6, 9)
    plain, _ = constrained_mean_shift(prediction, query, rows, Unconstrained(), k=5)
    for wide in (NearCompanion(40), NearCompanion(None)):
        loss, _ = constrained_mean_shift(prediction, query, rows, wide, k=5)
        torch.testing.assert_close(loss, plain, rtol=0, atol=0)


def test_a_query_without_a_companion_relaxes_to_mean_shift_and_a_row_without_one_is_nobodys_neighbour() -> None:
    rows = random_rows(40, seed=1)
    rows.companion[:20] = torch.nan
    alone, known = rows[:10], rows[20:30]
    prediction = unit(10, 6, 9)
    plain, _ = constrained_mean_shift(prediction, alone, rows, Unconstrained(), k=5)
    relaxed, _ = constrained_mean_shift(prediction, alone, rows, NearCompanion(5), k=5)
    torch.testing.assert_close(relaxed, plain, rtol=0, atol=0)
    _, neighbours = constrained_mean_shift(prediction, known, rows, NearCompanion(5), k=5)
    assert (neighbours.row >= 20).all()


def test_an_unlabelled_query_relaxes_and_an_unlabelled_row_is_in_no_class() -> None:
    rows = random_rows(40, seed=1)
    rows.label[:20] = cmsf.UNKNOWN
    prediction = unit(10, 6, 9)
    plain, _ = constrained_mean_shift(prediction, rows[:10], rows, Unconstrained(), k=5)
    relaxed, _ = constrained_mean_shift(prediction, rows[:10], rows, SameLabel(), k=5)
    torch.testing.assert_close(relaxed, plain, rtol=0, atol=0)
    _, neighbours = constrained_mean_shift(prediction, rows[20:30], rows, SameLabel(), k=30)
    assert (neighbours.row[neighbours.row != cmsf.UNKNOWN] >= 20).all()


def test_top_all_is_the_mean_of_the_class() -> None:
    rows = random_rows(40, seed=2)
    prediction = unit(40, 6, 9)
    loss, neighbours = constrained_mean_shift(prediction, rows, rows, SameLabel(), k=None)
    means = torch.stack([rows.embedding[rows.label == label].mean(0) for label in rows.label])
    torch.testing.assert_close(loss, (2 - 2 * (prediction * means).sum(1)).mean())
    assert neighbours.row is None


def test_leaving_the_query_out_leaves_a_class_of_one_out_of_the_loss() -> None:
    rows = Rows(unit(3, 4, 0), torch.arange(3), torch.tensor([0, 0, 1]))
    prediction = unit(3, 4, 1)
    for k in (5, None):
        loss, neighbours = constrained_mean_shift(prediction, rows, rows, SameLabel(), k, include_query=False)
        assert neighbours.count.tolist() == [1, 1, 0]
        torch.testing.assert_close(loss, (2 - 2 * (prediction[:2] * rows.embedding[[1, 0]]).sum(1)).mean())
        assert loss.isfinite()


def test_the_loss_is_a_mean_squared_distance_for_unit_vectors() -> None:
    rows = random_rows(30, seed=4)
    prediction = unit(30, 6, 9)
    loss, neighbours = constrained_mean_shift(prediction, rows, rows, k=5)
    squared = (prediction[:, None] - rows.embedding[neighbours.row]).square().sum(2).mean()
    torch.testing.assert_close(loss, squared)


def test_an_empty_bank_pulls_nobody() -> None:
    query, bank = random_rows(6, seed=0), MemoryBank(8, 6, companion_dim=6, dtype=torch.float64)
    for constraint in (Unconstrained(), SameLabel(), NearCompanion(5)):
        loss, neighbours = constrained_mean_shift(unit(6, 6, 1), query, bank, constraint, k=5, include_query=False)
        assert (float(loss), neighbours.count.tolist()) == (0, [0] * 6)


def test_a_query_that_is_not_in_the_bank_is_named() -> None:
    rows = random_rows(10, seed=0)
    bank = MemoryBank(10, 6, companion_dim=6, dtype=torch.float64)
    bank.enqueue(rows[:9])
    with pytest.raises(ValueError, match=f"1 of 10 queries .*image {int(rows.index[9])}\\) are not in the bank"):
        constrained_mean_shift(unit(10, 6, 0), rows, bank)


def test_a_query_whose_row_was_enqueued_otherwise_is_named() -> None:
    rows = random_rows(10, seed=0)
    bank = MemoryBank(10, 6, dtype=torch.float64)
    bank.enqueue(Rows(rows.embedding, rows.index))  # the labels were forgotten
    with pytest.raises(ValueError, match=r"10 of 10 queries .* are not related to their own rows"):
        constrained_mean_shift(unit(10, 6, 0), rows, bank, SameLabel())


def test_two_rows_of_an_image_are_refused() -> None:
    rows = random_rows(10, seed=0)
    twice = Rows(rows.embedding, torch.arange(10) % 9)
    with pytest.raises(ValueError, match="an image has two rows"):
        constrained_mean_shift(unit(10, 6, 0), twice, twice)


def test_a_bank_and_its_rows_are_searched_alike() -> None:
    rows = random_rows(10, seed=0)
    bank = MemoryBank(16, 6, companion_dim=6, dtype=torch.float64)
    bank.enqueue(rows)
    prediction = unit(10, 6, 1)
    for constraint in (Unconstrained(), SameLabel(), NearCompanion(3)):
        here, _ = cmsf.constrained_mean_shift(prediction, rows, bank, constraint)
        there, _ = cmsf.constrained_mean_shift(prediction, rows, rows, constraint)
        torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_the_self_supervised_objective_is_half_and_half() -> None:
    rows = random_rows(30, seed=5)
    bank = MemoryBank(30, 6, companion_dim=6, dtype=torch.float64)
    bank.enqueue(rows)
    prediction = unit(30, 6, 9)
    plain, _ = constrained_mean_shift(prediction, rows, rows, Unconstrained(), 5)
    near, _ = constrained_mean_shift(prediction, rows, rows, NearCompanion(5), 5)
    halves = (Term("unconstrained", Unconstrained(), 5, 0.5), Term("constrained", NearCompanion(5), 5, 0.5))
    step = LossInput(rows, bank, {SECOND: EncoderOutput(prediction, prediction, prediction[:, :0])})
    outcome = MeanShift(halves)(step)
    torch.testing.assert_close(outcome.loss, 0.5 * plain + 0.5 * near)
    assert {name: float(part) for name, part in outcome.parts.items()} == {
        "unconstrained": float(plain),
        "constrained": float(near),
    }


def test_with_small_crops_the_loss_is_the_mean_of_each_ones_own() -> None:
    rows = random_rows(30, seed=6)
    crops = {view: unit(8, 6, view) for view in (SECOND, EXTRA, EXTRA + 1)}
    objective = MeanShift((Term("unconstrained", Unconstrained(), 5),), extra_crops=2)
    assert objective.online == ((SECOND,), (EXTRA, EXTRA + 1))  # small crops pass together, apart from the large one
    step = LossInput(rows[:8], bank_of(rows), {view: EncoderOutput(v, v, v[:, :0]) for view, v in crops.items()})
    each = [constrained_mean_shift(v, rows[:8], rows, k=5)[0] for v in crops.values()]
    torch.testing.assert_close(objective(step).loss, sum(each) / 3)
