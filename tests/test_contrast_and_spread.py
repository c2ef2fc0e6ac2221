"""What short runs add to mean shift: a contrast, a term that spreads predictions, companions that cover the bank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from helpers import bank_of, noise, random_rows, unit
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.method.build import make_loss
from cmsf.method.constraints import NearCompanion, SameLabel, Unconstrained
from cmsf.method.losses import SECOND, SPREADS, ConstrainedNCE, LossInput, MeanShift, Spread, Term
from cmsf.method.rows import Rows
from cmsf.models.encoders import EncoderOutput
from cmsf.recipes.lookup import get_recipe
from cmsf.training.resolve import resolve
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

BATCH, TAU = 12, 0.2
MODES: dict[str, list[tuple[Term, Callable[[Rows, Rows], oracle.Related]]]] = {
    "byol": [(Term("pull", Unconstrained(), 1), oracle.everything)],
    "msf": [(Term("pull", Unconstrained(), 5), oracle.everything)],
    "by companion": [(Term("pull", NearCompanion(5), 5), lambda q, r: oracle.near_companion(q, r, 5))],
    "k below k'": [(Term("pull", NearCompanion(9), 2), lambda q, r: oracle.near_companion(q, r, 9))],
    "self": [
        (Term("plain", Unconstrained(), 5, 0.3), oracle.everything),
        (Term("constrained", NearCompanion(8), 3, 0.7), lambda q, r: oracle.near_companion(q, r, 8)),
    ],
    "sup": [(Term("pull", SameLabel(), 4), oracle.same_label)],
    "sup all": [(Term("pull", SameLabel(), None), oracle.same_label)],
}
SLOW: dict[str, Callable[[Tensor], Tensor]] = {"uniformity": oracle.uniformity, "koleo": oracle.koleo}


def step_of(rows: Rows, v: Tensor) -> LossInput:
    query = rows[torch.arange(len(rows) - BATCH, len(rows))]
    return LossInput(query, bank_of(rows), {SECOND: EncoderOutput(v, v, v[:, :0])})


def related_rows(rows: Rows, related: oracle.Related, sets: list[list[int]]) -> list[list[int]]:
    """C_i, or S_i where C_i is the whole bank."""
    whole = len(oracle.existing(rows))
    return [related(i) if len(related(i)) < whole else chosen for i, chosen in enumerate(sets)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("include_query", [True, False])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_contrast_and_gradient_equal_the_slow_loops(mode: str, include_query: bool, unknown: float) -> None:
    terms = [(replace(term, include_query=include_query), slow) for term, slow in MODES[mode]]
    for seed in range(4):
        rows = random_rows(32, seed, unknown=unknown)
        if "sup" not in mode:
            rows = replace(rows, label=torch.full_like(rows.index, UNKNOWN))
        fast, slow = (unit(BATCH, 6, seed + 50).requires_grad_() for _ in range(2))
        step = step_of(rows, fast)
        loss = ConstrainedNCE(tuple(term for term, _ in terms), temperature=TAU)(step).loss
        found = []
        for term, related_to in terms:
            related = related_to(step.query, rows)
            sets = oracle.chosen(step.query, rows, related, term.k, include_query)
            found.append((term.weight, sets, related_rows(rows, related, sets)))
        left_out = [[row for _, _, related in found for row in related[i]] for i in range(BATCH)]
        expected = sum(
            weight * oracle.constrained_nce(slow, step.query, rows, sets, left_out, TAU) for weight, sets, _ in found
        )
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(fast.grad, slow.grad, rtol=0, atol=1e-12)


def test_images_of_one_label_are_no_negatives_of_each_other() -> None:
    """Where the whole batch is of one class nothing is pushed away: the loss is zero whatever the pull."""
    rows = random_rows(32, seed=0)
    rows = replace(rows, label=torch.zeros_like(rows.label))
    v = unit(BATCH, 6, 1).requires_grad_()
    loss = ConstrainedNCE((Term("pull", SameLabel(), 3),), temperature=TAU)(step_of(rows, v)).loss
    assert float(loss.detach()) == 0
    loss.backward()
    assert not v.grad.any()


def test_a_small_temperature_in_single_precision_overflows_nothing() -> None:
    rows, v = random_rows(32, seed=0), unit(BATCH, 6, 1).float().requires_grad_()
    rows = replace(rows, embedding=rows.embedding.float(), companion=rows.companion.float())
    loss = ConstrainedNCE((Term("pull", SameLabel(), 3),), temperature=0.005)(step_of(rows, v)).loss
    loss.backward()
    assert loss.isfinite()
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("name", SPREADS)
def test_spread_and_gradient_equal_the_slow_loops(name: str) -> None:
    for seed in range(4):
        fast, slow = ((2 * unit(9, 6, seed)).requires_grad_() for _ in range(2))
        loss, expected = SPREADS[name](normalize(fast, dim=1)), SLOW[name](normalize(slow, dim=1))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(fast.grad, slow.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SPREADS)
def test_spread_is_less_where_vectors_are_apart_and_finite_where_two_are_equal(name: str) -> None:
    apart = torch.eye(4, dtype=torch.float64)
    close = normalize(torch.ones(4, 4, dtype=torch.float64) + 0.1 * apart, dim=1)
    assert float(SPREADS[name](apart)) < float(SPREADS[name](close))
    equal = torch.ones(3, 4).div(2).requires_grad_()
    loss = SPREADS[name](equal)
    loss.backward()
    assert loss.isfinite()
    assert equal.grad.isfinite().all()


def test_the_spread_is_added_with_its_weight() -> None:
    rows, v = random_rows(32, seed=0), unit(BATCH, 6, 1)
    terms = (Term("pull", Unconstrained(), 5),)
    plain = MeanShift(terms)(step_of(rows, v)).loss
    spread = MeanShift(terms, spread=Spread(SPREADS["uniformity"], 0.3))(step_of(rows, v))
    torch.testing.assert_close(spread.parts["spread"], oracle.uniformity(v))
    torch.testing.assert_close(spread.loss, plain + 0.3 * oracle.uniformity(v))


@pytest.mark.parametrize(
    ("having", "share", "holds"),
    [(0, 0.5, False), (15, 0.5, False), (16, 0.5, True), (31, 1.0, False), (32, 1.0, True), (1, 0.0, True)],
)
def test_companions_constrain_once_so_many_rows_have_one(having: int, share: float, holds: bool) -> None:
    rows, v = random_rows(32, seed=2), unit(BATCH, 6, 1)
    rows.companion[: 32 - having] = torch.nan
    step = step_of(rows, v)
    assert step.bank.companion_share() == having / 32
    terms = (Term("unconstrained", Unconstrained(), 5, 0.5), Term("constrained", NearCompanion(3), 5, 0.5))
    found = MeanShift(terms, companion_coverage=share)(step)
    assert found.scalars().get("companion_share") == (having / 32 if share else None)
    expected = MeanShift(terms if holds else (terms[0], terms[0]))(step)
    torch.testing.assert_close(found.loss, expected.loss)


def test_retired_rows_count_neither_as_covered_nor_as_missing() -> None:
    rows = random_rows(10, seed=2)
    rows.companion[:4] = torch.nan
    bank = bank_of(rows)
    bank.index[[0, 9]] = UNKNOWN
    assert bank.companion_share() == 5 / 8


def test_an_empty_bank_covers_nothing() -> None:
    assert bank_of(random_rows(4, seed=0)[:0]).companion_share() == 0


def test_labels_constrain_whatever_the_companions_cover() -> None:
    rows, v = random_rows(32, seed=2), unit(BATCH, 6, 1)
    rows.companion[:] = torch.nan
    terms = (Term("constrained", SameLabel(), 5),)
    found, expected = (MeanShift(terms, companion_coverage=share)(step_of(rows, v)) for share in (1.0, 0.0))
    assert float(found.loss) == float(expected.loss)


def test_a_spread_is_not_linear_in_the_predictions_so_a_batch_cannot_go_in_parts() -> None:
    recipe = get_recipe("msf+spread-small").changed({"size": 8, "batch_size": 16, "accumulate": 2})
    with pytest.raises(BadInput, match=r"--accumulate 2 is for losses .* and --spread uniformity is not"):
        resolve(recipe, noise(64, 8), 8)


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("cmsf-sup-small", {"companion_coverage": 0.5}, "--companion-coverage 0.5 is for --constraint companion"),
        ("msf-small", {"spread_weight": 3.0}, "--spread-weight 3.0 is for --spread uniformity or koleo"),
        ("simclr-small", {"spread": "koleo"}, "simclr does not use --spread koleo"),
        ("cmsf-self+nce-small", {"k": "all", "unconstrained_weight": 0.0}, "--k all with a contrast is for"),
    ],
)
def test_what_would_have_no_effect_is_refused(recipe: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        resolve(get_recipe(recipe).changed({"size": 8, "batch_size": 16} | changes), noise(64, 8), 8)


def test_variants_compose() -> None:
    loss = make_loss(get_recipe("cmsf-self+covered+nce+spread-small"))
    assert isinstance(loss, ConstrainedNCE)
    assert loss.companion_coverage > 0
    assert loss.spread is not None
    assert [type(term.constraint) for term in loss.terms] == [Unconstrained, NearCompanion]


def test_the_papers_recipes_have_none_of_it() -> None:
    for name in ("cmsf-self", "cmsf-sup", "cmsf-semi", "msf", "byol"):
        for scale in ("small", "standard", "imagenet", "adapt"):
            loss = make_loss(get_recipe(f"{name}-{scale}"))
            assert isinstance(loss, MeanShift)
            assert (loss.spread, loss.companion_coverage) == (None, 0)
