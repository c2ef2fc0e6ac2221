"""Every baseline's loss and gradient against its own paper's equation, and what they have in common."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import equations
import pytest
import torch
from helpers import bank_of, unit
from torch import Tensor
from torch.nn.functional import normalize

from cmsf.method.losses import (
    EXTRA,
    FIRST,
    ISD,
    NNCLR,
    PAWS,
    SECOND,
    SUPPORT,
    CrossEntropy,
    FixMatch,
    InfoNCE,
    Loss,
    LossInput,
    LossOutput,
    Prototypes,
    SimCLR,
    SimSiam,
    SupCon,
    SymmetricBYOL,
)
from cmsf.method.losses.base import masked_logits
from cmsf.method.rows import Rows
from cmsf.models.encoders import EncoderOutput
from cmsf.utils.constants import UNKNOWN

BATCH, BANK, SUPPORTING, DIM, CLASSES = 5, 12, 7, 4, 4
IMAGE = 77
"""One that is not among the others."""
SEEDS = range(4)
EQUATIONS: dict[str, tuple[Loss, Callable[..., Tensor]]] = {
    "moco": (InfoNCE(0.2), equations.info_nce),
    "simclr": (SimCLR(0.3), equations.simclr),
    "nnclr": (NNCLR(0.1), equations.nnclr),
    "byol": (SymmetricBYOL(), equations.byol),
    "simsiam": (SimSiam(), equations.simsiam),
    "isd": (ISD(0.1, 0.1), equations.isd),
    "isd with a temperature of the target": (ISD(0.1, 0.03), equations.isd),
    "supcon": (SupCon(0.3, include_target=True), equations.supcon),
    "supcon without the target": (SupCon(0.3, include_target=False), equations.supcon),
    "prototypes": (Prototypes(0.2), equations.prototypes),
    "cross-entropy": (CrossEntropy(), equations.named),
    "paws": (PAWS(0.2, 0.25), equations.paws),
    "paws with small crops": (PAWS(0.3, 0.5, smoothing=0.2, extra_crops=2), equations.paws),
    "fixmatch": (FixMatch(0.6, 3.0), equations.fixmatch),
}
OBJECTIVES = {name: objective for name, (objective, _) in EQUATIONS.items()}
WITH_BANK = [name for name, objective in OBJECTIVES.items() if objective.bank != "none"]
OWN_ROW_LEFT_OUT = ["moco", "nnclr", "isd", "supcon without the target"]
BY_LABEL = ["cross-entropy", "supcon", "supcon without the target", "prototypes"]
LEARNING = {
    "moco": {(SECOND, "embedding")},
    "simclr": {(FIRST, "embedding"), (SECOND, "embedding")},
    "nnclr": {(FIRST, "prediction"), (SECOND, "prediction")},
    "byol": {(FIRST, "prediction"), (SECOND, "prediction")},
    "simsiam": {(FIRST, "prediction"), (SECOND, "prediction")},
    "isd": {(SECOND, "prediction")},
    "isd with a temperature of the target": {(SECOND, "prediction")},
    "supcon": {(SECOND, "embedding")},
    "supcon without the target": {(SECOND, "embedding")},
    "prototypes": {(SECOND, "prediction")},
    "cross-entropy": {(SECOND, "logits")},
    "paws": {(view, "prediction") for view in (SUPPORT, FIRST, SECOND)},
    "paws with small crops": {(view, "prediction") for view in (SUPPORT, FIRST, SECOND, EXTRA, EXTRA + 1)},
    "fixmatch": {(SUPPORT, "logits"), (SECOND, "logits")},
}
"""What each paper lets a gradient into; all else is held still."""


@dataclass(frozen=True)
class Made:
    """A step, and the outputs of the online network that it is made of, before they are brought to unit length."""

    step: LossInput
    outputs: dict[tuple[int, str], Tensor]

    def with_bank(self, bank: Rows) -> "Made":
        return Made(replace(self.step, bank=bank_of(bank)), self.outputs)

    def learned(self, loss: Tensor) -> dict[tuple[int, str], Tensor]:
        """The gradient of each output, zero where there is none."""
        found = torch.autograd.grad(loss, list(self.outputs.values()), retain_graph=True, materialize_grads=True)
        return dict(zip(self.outputs, found, strict=True))


def make(objective: Loss, seed: int, unknown: float = 0.3, dtype: torch.dtype = torch.float64) -> Made:
    """A random step with all that the objective may look at.

    The bank holds older rows of some of the images, retired rows, and the queries where they enter it before the loss.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)

    def labels(count: int) -> Tensor:
        label = torch.randint(CLASSES, (count,), generator=generator)
        return label.where(torch.rand(count, generator=generator) >= unknown, UNKNOWN)

    outputs: dict[tuple[int, str], Tensor] = {}
    online: dict[int, EncoderOutput] = {}
    for view in (view for together in objective.online for view in together):
        count = SUPPORTING if view == SUPPORT else BATCH
        for name, columns in (("embedding", DIM), ("prediction", DIM), ("logits", CLASSES)):
            outputs[view, name] = normal(count, columns).requires_grad_()
        online[view] = EncoderOutput(
            normalize(outputs[view, "embedding"], dim=1),
            normalize(outputs[view, "prediction"], dim=1),
            2 * outputs[view, "logits"],  # spread, so that FixMatch is sure of some
        )
    u = {view: normalize(normal(BATCH, DIM), dim=1) for together in objective.target for view in together}
    target = {view: EncoderOutput(each, each, each[:, :0]) for view, each in u.items()}
    first = next(view for view in (*target, *online) if view != SUPPORT)
    label = labels(BATCH)
    label[0] = 1  # somebody has one
    query = Rows((online | target)[first].embedding.detach(), torch.arange(BATCH), label)
    older = Rows(normalize(normal(BANK, DIM), dim=1), torch.arange(BANK) + 2, labels(BANK))
    bank = joined(older[5:], query) if objective.bank == "before" else older
    bank.index[[1, 4]] = UNKNOWN
    support = None
    if objective.needs_support:  # not of all classes, and not in their order
        support = Rows(
            online[SUPPORT].embedding.detach(), torch.arange(SUPPORTING), torch.tensor([3, 0, 3, 1, 0, 1, 3])
        )
    return Made(LossInput(query, bank_of(bank), online, target, support), outputs)


def joined(one: Rows, other: Rows) -> Rows:
    return Rows(
        *(torch.cat([getattr(each, name) for each in (one, other)]) for name in ("embedding", "index", "label"))
    )


def of(rows: Rows, index: int, label: int, embedding: Tensor) -> Rows:
    """These rows and one more."""
    return joined(rows, Rows(embedding[None].detach(), torch.tensor([index]), torch.tensor([label])))


def of_one_image(made: Made) -> Made:
    """All queries are of one image, so that its row is nobody else's."""
    query = replace(made.step.query, index=torch.full((BATCH,), IMAGE))
    return Made(replace(made.step, query=query), made.outputs)


def assert_alike(one: tuple[LossOutput, Made], other: tuple[LossOutput, Made]) -> None:
    """The same loss and the same gradient of every output."""
    (first, made), (second, made_too) = one, other
    torch.testing.assert_close(first.loss, second.loss, rtol=0, atol=1e-12)
    gradients, expected = made.learned(first.loss), made_too.learned(second.loss)
    for output, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[output], rtol=0, atol=1e-12)


def assert_nothing_to_learn(outcome: LossOutput, made: Made) -> None:
    assert float(outcome.loss.detach()) == 0
    for gradient in made.learned(outcome.loss).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("unknown", [0.0, 0.4])
def test_loss_and_gradient_equal_the_papers_equation(name: str, seed: int, unknown: float) -> None:
    objective, equation = EQUATIONS[name]
    made = make(objective, seed, unknown)
    loss, expected = objective(made.step).loss, equation(objective, made.step)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    gradient, expected_gradient = made.learned(loss), made.learned(expected)
    for output in made.outputs:
        torch.testing.assert_close(gradient[output], expected_gradient[output], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_gradient_goes_where_the_paper_lets_it_and_nowhere_else(name: str) -> None:
    made = make(OBJECTIVES[name], seed=0)
    learned = made.learned(OBJECTIVES[name](made.step).loss)
    assert {output for output, gradient in learned.items() if gradient.any()} == LEARNING[name]


@pytest.mark.parametrize("name", OWN_ROW_LEFT_OUT)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_older_row_of_the_same_image_is_neither_key_nor_anchor_nor_neighbour(name: str, seed: int) -> None:
    objective = OBJECTIVES[name]
    made = of_one_image(make(objective, seed, unknown=0))
    others = made.step.rows[made.step.rows.index >= BATCH]
    label = int(made.step.query.label[0])
    nearest = made.step.online[SECOND].embedding[0]
    plain = made.with_bank(others)
    with_own = made.with_bank(of(others, IMAGE, label, nearest))
    with_anothers = made.with_bank(of(others, IMAGE + 1, label, nearest))
    assert_alike((objective(with_own.step), with_own), (objective(plain.step), plain))
    # Were it of another image, it would be seen.
    assert abs(float((objective(with_anothers.step).loss - objective(plain.step).loss).detach())) > 1e-4


def test_supcon_with_the_target_has_it_among_the_positives() -> None:
    u, z = unit(1, DIM, 0), unit(1, DIM, 1)
    own = Rows(u, torch.tensor([3]), torch.tensor([2]))
    other = Rows(unit(1, DIM, 2), torch.tensor([4]), torch.tensor([0]))
    step = LossInput(
        own,
        bank_of(joined(own, other)),
        {SECOND: EncoderOutput(z, z, z[:, :0])},
        {FIRST: EncoderOutput(u, u, u[:, :0])},
    )
    near, far = (float((z @ each.T).exp()) for each in (u, other.embedding))
    assert float(SupCon(1.0, include_target=True)(step).loss) == pytest.approx(
        -float(torch.tensor(near / (near + far)).log()), abs=1e-6
    )
    # Without it there is nobody to be like.
    assert float(SupCon(1.0, include_target=False)(step).loss) == 0


@pytest.mark.parametrize("name", WITH_BANK)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_retired_row_is_not_there(name: str, seed: int) -> None:
    objective = OBJECTIVES[name]
    made = make(objective, seed)
    near = made.step.online[SECOND]
    bank = made.step.rows
    # Near to whatever is compared, and with a label that it would have kept by mistake.
    more = of(of(bank, UNKNOWN, 1, near.embedding[0]), UNKNOWN, 2, near.prediction[1])
    fewer = bank[bank.exists]
    for changed in (made.with_bank(more), made.with_bank(fewer)):
        assert_alike((objective(changed.step), changed), (objective(made.step), made))


@pytest.mark.parametrize("name", WITH_BANK)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_the_bank_is_of_no_matter(name: str, seed: int) -> None:
    objective = OBJECTIVES[name]
    made = make(objective, seed)
    order = torch.randperm(len(made.step.rows), generator=torch.Generator().manual_seed(seed))
    turned = made.with_bank(made.step.rows[order])
    assert_alike((objective(turned.step), turned), (objective(made.step), made))


@pytest.mark.parametrize(
    ("left", "name"),
    [
        *(("nothing", name) for name in WITH_BANK),
        *(("retired rows", name) for name in WITH_BANK),
        *(("the queries' own rows", name) for name in OWN_ROW_LEFT_OUT),
    ],
)
def test_with_nothing_to_compare_with_there_is_nothing_to_learn(left: str, name: str) -> None:
    objective = OBJECTIVES[name]
    made = of_one_image(make(objective, seed=0, unknown=0))
    bank = made.step.rows
    retired = replace(bank, index=torch.full_like(bank.index, UNKNOWN))
    own = of(retired, IMAGE, 1, unit(1, DIM, 0)[0])
    made = made.with_bank({"nothing": bank[:0], "retired rows": retired, "the queries' own rows": own}[left])
    assert_nothing_to_learn(objective(made.step), made)


def test_where_no_row_is_allowed_none_is_ruled_out_and_the_vector_is_marked() -> None:
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    scores, some = masked_logits(unit(2, DIM, 0), Rows(unit(3, DIM, 1), torch.arange(3)), allowed, 0.5)
    assert some.tolist() == [True, False]
    assert scores.isfinite().tolist() == [[True, False, True], [True, True, True]]
    torch.testing.assert_close(scores[1], unit(2, DIM, 0)[1] @ unit(3, DIM, 1).T / 0.5)


@pytest.mark.parametrize("name", BY_LABEL)
def test_a_batch_without_a_label_has_nothing_to_learn(name: str) -> None:
    objective = OBJECTIVES[name]
    made = make(objective, seed=0)
    nameless = replace(made.step.query, label=torch.full((BATCH,), UNKNOWN))
    made = Made(replace(made.step, query=nameless), made.outputs)
    assert_nothing_to_learn(objective(made.step), made)


@pytest.mark.parametrize("name", BY_LABEL)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_image_without_a_label_is_left_out_of_the_mean(name: str, seed: int) -> None:
    objective = OBJECTIVES[name]
    made = make(objective, seed, unknown=0)
    nameless = replace(made.step.query, label=made.step.query.label.index_fill(0, torch.tensor([1, 3]), UNKNOWN))
    some = Made(replace(made.step, query=nameless), made.outputs)
    rest = torch.tensor([0, 2, 4])

    def part(encoded: EncoderOutput) -> EncoderOutput:
        return EncoderOutput(encoded.embedding[rest], encoded.prediction[rest], encoded.logits[rest])

    online, target = ({v: part(each) for v, each in views.items()} for views in (made.step.online, made.step.target))
    alone = Made(replace(made.step, query=made.step.query[rest], online=online, target=target), made.outputs)
    assert_alike((objective(some.step), some), (objective(alone.step), alone))


@pytest.mark.parametrize("name", ["supcon", "supcon without the target"])
def test_a_row_without_a_label_is_told_from_but_nobodys_positive(name: str) -> None:
    objective = OBJECTIVES[name]
    made = make(objective, seed=1)
    near = made.step.online[SECOND].embedding[0]
    nameless, of_no_query = (made.with_bank(of(made.step.rows, IMAGE, label, near)) for label in (UNKNOWN, CLASSES))
    assert_alike((objective(nameless.step), nameless), (objective(of_no_query.step), of_no_query))
    assert float((objective(nameless.step).loss - objective(made.step).loss).detach()) > 1e-3


def test_a_row_without_a_label_is_in_no_prototype_and_makes_none() -> None:
    objective = OBJECTIVES["prototypes"]
    made = make(objective, seed=1)
    more = made.with_bank(of(made.step.rows, IMAGE, UNKNOWN, made.step.online[SECOND].prediction[0]))
    assert_alike((objective(more.step), more), (objective(made.step), made))


def test_an_image_whose_class_has_no_prototype_is_left_out() -> None:
    objective = OBJECTIVES["prototypes"]
    made = make(objective, seed=0, unknown=0)
    nameless, strange = (
        Made(replace(made.step, query=replace(made.step.query, label=label)), made.outputs)
        for label in (made.step.query.label.index_fill(0, torch.tensor([2]), other) for other in (UNKNOWN, 99))
    )
    assert_alike((objective(strange.step), strange), (objective(nameless.step), nameless))


def test_nnclr_leaves_an_image_without_a_neighbour_out_but_keeps_it_as_a_negative() -> None:
    objective = NNCLR(0.5)
    made = make(objective, seed=3)
    # The bank holds image 0 alone, which is everyone's neighbour but its own.
    q = unit(1, DIM, 5)
    made = made.with_bank(Rows(q, torch.tensor([0]), torch.tensor([1])))
    losses = []
    for view in (SECOND, FIRST):
        scores = [q[0] @ p / 0.5 for p in made.step.online[view].prediction]
        losses += [-equations.softmax(scores)[i].log() for i in range(1, BATCH)]
    torch.testing.assert_close(objective(made.step).loss, equations.mean(losses), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_paws_says_what_its_loss_is_made_of(seed: int) -> None:
    made = make(OBJECTIVES["paws"], seed)
    outcome = OBJECTIVES["paws"](made.step)
    torch.testing.assert_close(outcome.loss, outcome.parts["agreement"] - outcome.parts["entropy"])
    # Of three classes in the support, whatever there are besides.
    assert 0 < float(outcome.parts["entropy"].detach()) <= float(torch.tensor(3.0).log())


def test_paws_is_least_where_views_agree_for_certain_and_classes_come_up_alike() -> None:
    """Where every image is one of the support's, the agreement is the labels' smoothing, and the entropy is log C."""
    support = torch.eye(3, dtype=torch.float64)
    at_class = EncoderOutput(support, support, support[:, :0])
    rows = Rows(support, torch.arange(3), torch.arange(3))
    step = LossInput(rows, bank_of(rows[:0]), {SUPPORT: at_class, FIRST: at_class, SECOND: at_class}, support=rows)
    outcome = PAWS(0.01, 0.25, smoothing=0.03)(step)
    assert float(outcome.parts["entropy"]) == pytest.approx(float(torch.tensor(3.0).log()), abs=1e-6)
    # With p = (0.98, 0.01, 0.01), all but 1e-8 of the sharpened target is on the first.
    assert float(outcome.parts["agreement"]) == pytest.approx(-float(torch.tensor(0.98).log()), abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_fixmatch_says_what_its_loss_is_made_of_and_what_it_thinks_of_images_without_a_label(seed: int) -> None:
    objective = FixMatch(0.6, 3.0)
    made = make(objective, seed, unknown=0.5)
    outcome = objective(made.step)
    torch.testing.assert_close(outcome.loss, outcome.parts["labelled"] + 3 * outcome.parts["unlabelled"])
    chances = [equations.softmax(list(scores.detach())) for scores in made.step.online[FIRST].logits]
    expected = [
        (i, chance.index(max(chance)), float(max(chance)) >= 0.6)
        for i, chance in enumerate(chances)
        if int(made.step.query.label[i]) == UNKNOWN
    ]
    guess = outcome.pseudo_labels
    assert guess is not None
    columns = (guess.index.tolist(), guess.label.tolist(), guess.confident.tolist())
    assert list(zip(*columns, strict=True)) == expected


def test_fixmatch_is_sure_of_some_images_here_and_of_others_not() -> None:
    """Otherwise the threshold would not have been tested above."""
    sure = [
        bool(confident)
        for seed in SEEDS
        for confident in OBJECTIVES["fixmatch"](
            make(OBJECTIVES["fixmatch"], seed, unknown=1).step
        ).pseudo_labels.confident
    ]
    assert 0.2 < sum(sure) / len(sure) < 0.8


def test_fixmatch_learns_nothing_from_images_that_it_is_not_sure_of() -> None:
    objective = FixMatch(1.0, 3.0)
    made = make(objective, seed=0)
    outcome = objective(made.step)
    assert float(outcome.parts["unlabelled"].detach()) == 0
    assert {output for output, gradient in made.learned(outcome.loss).items() if gradient.any()} == {
        (SUPPORT, "logits")
    }


@pytest.mark.parametrize(
    "objective",
    [
        InfoNCE(0.01),
        SimCLR(0.01),
        NNCLR(0.01),
        ISD(0.01, 0.01),
        SupCon(0.01, False),
        Prototypes(0.01),
        PAWS(0.01, 0.05),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_a_small_temperature_in_single_precision_overflows_nothing(objective: Loss) -> None:
    made = make(objective, seed=0, dtype=torch.float32)
    loss = objective(made.step).loss
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in made.learned(loss).values())


def test_paws_and_fixmatch_alone_want_labelled_images_beside_the_batch_and_say_so() -> None:
    wanting = {name for name, objective in OBJECTIVES.items() if objective.needs_support}
    assert wanting == {"paws", "paws with small crops", "fixmatch"}
    for name in wanting:
        step = replace(make(OBJECTIVES[name], seed=0).step, support=None)
        with pytest.raises(ValueError, match="needs labelled images beside the batch"):
            OBJECTIVES[name](step)


@pytest.mark.parametrize("name", BY_LABEL)
def test_an_objective_that_learns_from_labels_is_not_content_with_none(name: str) -> None:
    assert OBJECTIVES[name].learns_from_labels
    made = make(OBJECTIVES[name], seed=0)
    nothing_known = Rows(made.step.query.embedding, made.step.query.index)
    with pytest.raises(ValueError, match="learns from labels"):
        OBJECTIVES[name](replace(made.step, query=nothing_known))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not OBJECTIVES[name].learns_from_labels])
def test_an_objective_that_learns_from_no_labels_does_not_look_at_them(name: str) -> None:
    assert not OBJECTIVES[name].needs_support
    made = make(OBJECTIVES[name], seed=0)
    query, bank = (Rows(rows.embedding, rows.index) for rows in (made.step.query, made.step.rows))
    blind = Made(replace(made.step, query=query, bank=bank_of(bank)), made.outputs)
    assert_alike((OBJECTIVES[name](blind.step), blind), (OBJECTIVES[name](made.step), made))
