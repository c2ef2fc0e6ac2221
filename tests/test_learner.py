"""Whole training steps against the method written out by hand, with lists for bank and cache."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import oracle
import pytest
import torch
from helpers import bank_of
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.data.transforms import Augmentation, RandAugment, WholeBatch
from cmsf.method import build
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.method.losses import (
    EXTRA,
    FIRST,
    ISD,
    NNCLR,
    PAWS,
    SECOND,
    SUPPORT,
    THIRD,
    CrossEntropy,
    FixMatch,
    InfoNCE,
    Loss,
    LossInput,
    Prototypes,
    SimCLR,
    SimSiam,
    SupCon,
    SymmetricBYOL,
)
from cmsf.method.pseudo_labels import _TRAINING
from cmsf.method.rows import Rows
from cmsf.method.supervision import PseudoLabels, ThirdView
from cmsf.models.encoders import EncoderOutput
from cmsf.recipes import BASELINES, METHODS, OURS
from cmsf.recipes.recipe import Recipe, ResolvedRecipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.rng import permutation

IMAGES, BATCH, BANK, EPOCHS, SEED = 14, 4, 9, 4, 3
LR, DECAY, MOMENTUM, TARGET = 0.1, 1e-3, 0.9, 0.8
GENTLE_LR = 0.01
"""For low temperatures, whose gradients are large."""
PICTURES = torch.randint(256, (IMAGES, 1, 10, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABEL = torch.arange(IMAGES) % 3
FEW = LABEL.where(torch.arange(IMAGES) < 7, UNKNOWN)
VARIANTS: dict[str, dict[str, Any]] = {
    **{method: {} for method in OURS},
    "cmsf-sup without u": {"method": "cmsf-sup", "include_query": False},
    "cmsf-sup-all without u": {"method": "cmsf-sup-all", "include_query": False},
    "cmsf-self by a third view": {"method": "cmsf-self", "companions": "third-view"},
    "cmsf-self with multi-crop": {"method": "cmsf-self", "extra_crops": 3},
    "cmsf-semi": {"pseudo_threshold": 0.8, "pseudo_lr": 0.02},
    "cmsf-semi by a layer": {
        "method": "cmsf-semi",
        "pseudo_labels": "linear",
        "pseudo_threshold": 0.4,
        "pseudo_lr": 0.05,
    },
    "cmsf-semi by three layers": {"method": "cmsf-semi", "pseudo_labels": "mlp-3", "pseudo_threshold": 0.8},
    "cmsf-semi by neighbours": {"method": "cmsf-semi", "pseudo_labels": "knn", "pseudo_threshold": 0.7},
}


class TinyNet(nn.Module):
    """Used in double precision, so that fast and slow code can be told apart from rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@pytest.fixture(autouse=True, scope="module")
def views_are_made_once() -> Iterator[None]:
    """For all methods, and for fast and slow code alike: making them would be most of the time."""
    seen: dict[tuple[Augmentation, tuple[int, ...], int, int], Tensor] = {}
    plain = Augmentation.__call__

    def remembered(how: Augmentation, batch: WholeBatch, view: int) -> Tensor:
        key = (how, tuple(batch.index.tolist()), batch.epoch, view)
        if key not in seen:
            seen[key] = plain(how, batch, view)
        return seen[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Augmentation, "__call__", remembered)
        yield


def make(method: str, label: Tensor = LABEL, **changes: Any) -> tuple[ResolvedRecipe, Learner]:
    recipe = METHODS[method](
        Recipe(
            size=8,
            bank_size=BANK,
            batch_size=BATCH,
            projection_hidden=7,
            projection_dim=5,
            prediction_hidden=6,
            lr=LR,
            sgd_momentum=MOMENTUM,
            weight_decay=DECAY,
            seed=SEED,
            precision="fp64",
        )
    )
    # k and k' small enough to leave somebody out of a bank of nine.
    recipe = replace(recipe, k=recipe.k if recipe.k in (1, "all") else 3, companion_k=4, **changes)
    numbers = {"weak_crop": 0.2, "strong_crop": 0.2, "extra_size": 8, "cache": "ram"}
    numbers |= {
        "warmup_epochs": 0,
        "support_classes": 0,
        "support_images": 0,
    }  # which images support a step is said here, step by step
    resolved = ResolvedRecipe(**(asdict(recipe.filled(ResolvedRecipe.usual())) | numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_backbone", lambda *_: TinyNet())
        return resolved, make_learner(resolved, label, "cpu")


def of_variant(variant: str) -> tuple[ResolvedRecipe, Learner]:
    changes = dict(VARIANTS[variant])
    return make(changes.pop("method", variant), FEW if "semi" in variant else LABEL, **changes)


class Descent:
    """SGD written out."""

    def __init__(self, theta: list[nn.Parameter], lr: float) -> None:
        self.theta, self.lr = theta, lr
        self.velocity: list[Tensor | None] = [None] * len(theta)

    def __call__(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, self.theta)
        with torch.no_grad():
            for j, (parameter, gradient) in enumerate(zip(self.theta, gradients, strict=True)):
                change = gradient + DECAY * parameter
                before = self.velocity[j]
                self.velocity[j] = change if before is None else MOMENTUM * before + change
                parameter -= self.lr * self.velocity[j]


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module) -> None:
    for f, g in zip(target.parameters(), online.parameters(), strict=True):
        f.copy_(TARGET * f + (1 - TARGET) * g)


def entered(bank: list[dict | None], entering: list[dict]) -> list[dict | None]:
    """The ring after a batch: older rows of its images retire, and the oldest rows leave."""
    images = [row["image"] for row in entering]
    return ([None if row and row["image"] in images else row for row in bank] + entering)[-BANK:]


class ByHand:
    """Sec. 2 with a list for the bank, a dictionary for the previous epoch, and SGD written out."""

    def __init__(self, recipe: Recipe, learner: Learner) -> None:
        self.recipe, self.given = recipe, getattr(learner.supervision, "label", LABEL)
        self.teacher = Teacher(recipe, learner.supervision) if isinstance(learner.supervision, PseudoLabels) else None
        self.views = learner.views
        encoders = copy.deepcopy(learner.encoders)
        self.f, self.g, self.h = encoders.target, encoders.online, encoders.predictor
        self.descend = Descent([*self.g.parameters(), *self.h.parameters()], LR)
        self.bank: list[dict | None] = []
        self.previous: dict[int, Tensor] = {}

    def step(self, index: Tensor, epoch: int) -> float:
        def view(number: int) -> Tensor:
            return self.views[number](WholeBatch(index, SEED, epoch, PICTURES[index]), number).double()

        with torch.no_grad():
            u = normalize(self.f(view(FIRST)), dim=1)
            third = normalize(self.f(view(THIRD)), dim=1) if self.recipe.companions == "third-view" else None
        predictions = [normalize(self.h(self.g(view(SECOND))), dim=1)]
        if self.recipe.extra_crops:  # all crops of a size pass together
            crops = torch.cat([view(EXTRA + number) for number in range(self.recipe.extra_crops)])
            predictions += normalize(self.h(self.g(crops)), dim=1).split(len(index))
        entering = []
        for i, image in enumerate(index.tolist()):
            w = third[i] if third is not None else self.previous.get(image, torch.full_like(u[i], torch.nan))
            label = int(self.given[image]) if self.teacher is None else self.teacher.label(image, u[i])
            entering.append({"image": image, "u": u[i], "w": w, "label": label})
            self.previous[image] = u[i]
        self.bank = entered(self.bank, entering)
        rows = self._rows([row for row in self.bank if row])
        query = self._rows(entering)

        k = None if self.recipe.k == "all" else self.recipe.k
        plain, constrained = oracle.everything(query, rows), None
        if self.recipe.constraint == "label":
            constrained = oracle.same_label(query, rows)
        if self.recipe.constraint == "companion":
            constrained = oracle.near_companion(query, rows, self.recipe.companion_k)

        def pull(related) -> Tensor:
            chosen = oracle.chosen(query, rows, related, k, self.recipe.include_query)
            return sum(oracle.loss(v, rows, chosen) for v in predictions) / len(predictions)

        if constrained is None:
            loss = pull(plain)
        elif self.recipe.constraint == "companion":
            loss = (pull(plain) + pull(constrained)) / 2
        else:
            loss = pull(constrained)

        self.descend(loss)
        follow(self.f, self.g)
        return float(loss.detach())

    @staticmethod
    def _rows(rows: list[dict]) -> Rows:
        index, label = (torch.tensor([row[name] for row in rows]) for name in ("image", "label"))
        return Rows(torch.stack([row["u"] for row in rows]), index, label, torch.stack([row["w"] for row in rows]))


class Teacher:
    """Pseudo-labels by hand: a dictionary of the labelled images' embeddings, and SGD written out."""

    def __init__(self, recipe: Recipe, supervision: PseudoLabels) -> None:
        self.recipe, self.classifier = recipe, copy.deepcopy(supervision.classifier)
        self.seen: dict[int, Tensor] = {}
        self.voters: dict[int, Tensor] = {}
        self.times = 0
        self.guesses: list[int] = []

    def label(self, image: int, u: Tensor) -> int:
        if FEW[image] != UNKNOWN:
            self.seen[image] = u
            return int(FEW[image])
        if not self.times:
            return UNKNOWN
        chance = self.probabilities(u)
        best = max(range(3), key=lambda c: chance[c])
        self.guesses.append(best if chance[best] >= self.recipe.pseudo_threshold else UNKNOWN)
        return self.guesses[-1]

    def probabilities(self, u: Tensor) -> list[float]:
        if self.recipe.pseudo_labels == "knn":
            nearest = sorted(self.voters, key=lambda image: (-float(u @ self.voters[image]), image))[:2]
            return [sum(int(FEW[image]) == c for image in nearest) / len(nearest) for c in range(3)]
        with torch.no_grad():
            exps = [float(score.exp()) for score in self.classifier.layers.eval()(u[None])[0]]
        return [e / sum(exps) for e in exps]

    def learn(self) -> None:
        self.voters = dict(self.seen)
        images = sorted(self.seen)
        if self.recipe.pseudo_labels != "knn":
            layers = self.classifier.layers.train()
            velocity = [torch.zeros_like(parameter) for parameter in layers.parameters()]
            for epoch in range(20):  # ten epochs of one batch would be ten steps: twenty are the least
                order = [images[i] for i in permutation(len(images), SEED, _TRAINING + self.times, epoch).tolist()]
                scores = layers(torch.stack([self.seen[image] for image in order]))
                right = scores[torch.arange(len(order)), FEW[order]]
                loss = (scores.exp().sum(1).log() - right).mean()
                gradients = torch.autograd.grad(loss, list(layers.parameters()))
                with torch.no_grad():
                    for v, parameter, gradient in zip(velocity, layers.parameters(), gradients, strict=True):
                        v.mul_(0.9).add_(gradient + 1e-4 * parameter)
                        parameter -= self.recipe.pseudo_lr * v
        self.times += 1


def batches(epoch: int) -> list[Tensor]:
    """All but the last, incomplete one."""
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
    return list(order.split(BATCH)[: IMAGES // BATCH])


def refuse(index: Tensor) -> Tensor:
    raise AssertionError("embeddings are cached online; nobody asks for a pass of its own")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_of_many_steps_equals_the_method_written_out_by_hand(variant: str) -> None:
    recipe, learner = of_variant(variant)
    slow = ByHand(recipe, learner)
    for epoch in range(EPOCHS):
        for number, index in enumerate(batches(epoch)):
            if slow.teacher is not None and (epoch, number) != (0, 0) and number in (0, 2):
                learner.supervision.refresh(refuse)
                slow.teacher.learn()
            _, outcome = learner.step(WholeBatch(index, SEED, epoch, PICTURES[index]), TARGET)
            assert float(outcome.loss.detach()) == pytest.approx(slow.step(index, epoch), abs=1e-10)
    if slow.teacher is not None:  # both kinds of guesses were there to be told apart
        assert UNKNOWN in slow.teacher.guesses
        assert len(set(slow.teacher.guesses)) > 1
    for name, value in slow.g.state_dict().items():
        torch.testing.assert_close(learner.encoders.online.state_dict()[name], value, rtol=0, atol=1e-10)
    for fast, by_hand in zip(learner.encoders.target.parameters(), slow.f.parameters(), strict=True):
        torch.testing.assert_close(fast, by_hand, rtol=0, atol=1e-10)


@dataclass(frozen=True)
class Plan:
    """What a baseline does in a step, in its paper's words.

    online, target: which views each encoder sees; those of an inner tuple are one batch to BatchNorm.
    enters: when the first view's embeddings enter the bank, before the loss or after it; never: there is none.
    strong: the views that are distorted and not cropped and mirrored alone.
    method, changes: the recipe it is of, where that is not its name, and what is changed in it.
    """

    loss: Loss
    online: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...] = ()
    heads: tuple[str, ...] = ("projector",)
    enters: str = "never"
    strong: tuple[int, ...] = (FIRST, SECOND)
    method: str = ""
    changes: dict[str, Any] = field(default_factory=dict)


ROUNDING = 1e-7
"""What a dozen steps may make of it: SimSiam's three BatchNorms, each over four images, turn 1e-16 into 1e-9."""
BOTH_HEADS = ("projector", "predictor")
PLANS = {
    "xent": Plan(CrossEntropy(), ((SECOND,),), heads=("classifier",), strong=(SECOND,)),
    "supcon": Plan(SupCon(0.1, True), ((SECOND,),), ((FIRST,),), enters="before", strong=(SECOND,)),
    "supcon without u": Plan(
        SupCon(0.1, False),
        ((SECOND,),),
        ((FIRST,),),
        enters="before",
        strong=(SECOND,),
        method="supcon",
        changes={"include_query": False},
    ),
    "proto-nw": Plan(Prototypes(0.1), ((SECOND,),), ((FIRST,),), BOTH_HEADS, enters="before", strong=(SECOND,)),
    "moco-v2": Plan(InfoNCE(0.2), ((SECOND,),), ((FIRST,),), enters="after"),
    "nnclr": Plan(NNCLR(0.1), ((FIRST, SECOND),), heads=BOTH_HEADS, enters="after"),
    "simclr": Plan(SimCLR(0.1), ((FIRST, SECOND),)),
    "byol-sym": Plan(SymmetricBYOL(), ((FIRST,), (SECOND,)), ((FIRST,), (SECOND,)), BOTH_HEADS),
    "simsiam": Plan(SimSiam(), ((FIRST,), (SECOND,)), heads=BOTH_HEADS),
    "isd": Plan(ISD(0.02, 0.02), ((SECOND,),), ((FIRST,),), BOTH_HEADS, enters="after", strong=(SECOND,)),
    "paws": Plan(PAWS(0.1, 0.25), ((SUPPORT, FIRST, SECOND),), heads=BOTH_HEADS, strong=(SUPPORT, FIRST, SECOND)),
    "paws with small crops": Plan(
        PAWS(0.1, 0.25, extra_crops=2),
        ((SUPPORT, FIRST, SECOND), (EXTRA, EXTRA + 1)),
        heads=BOTH_HEADS,
        strong=(SUPPORT, FIRST, SECOND, EXTRA, EXTRA + 1),
        method="paws",
        changes={"extra_crops": 2},
    ),
    "fixmatch": Plan(
        FixMatch(0.5, 1.0),
        ((SUPPORT, FIRST, SECOND),),
        heads=("classifier",),
        strong=(),
        changes={"pseudo_threshold": 0.5},
    ),
}


class BaselineByHand:
    """A plan carried out: passes, a list for the bank, SGD and the moving average written out. The loss is the class's
    own, which test_losses holds against its paper."""

    def __init__(self, plan: Plan, learner: Learner) -> None:
        self.plan, self.views, self.encoders = plan, learner.views, copy.deepcopy(learner.encoders)
        self.descend = Descent(self.encoders.trainable_parameters(), GENTLE_LR)
        self.bank: list[dict | None] = []

    def step(self, index: Tensor, support: Tensor, epoch: int, number: int) -> tuple[float, Tensor]:
        def images(together: tuple[int, ...]) -> tuple[Tensor, list[int]]:
            made = []
            for view in together:
                whose, when = (support, number) if view == SUPPORT else (index, epoch)
                made.append(self.views[view](WholeBatch(whose, SEED, when, PICTURES[whose]), view).double())
            return torch.cat(made), [len(each) for each in made]

        online: dict[int, EncoderOutput] = {}
        target: dict[int, EncoderOutput] = {}
        for together in self.plan.online:
            whole, counts = images(together)
            features = self.encoders.online.backbone(whole)
            projection = self.encoders.online.projector(features) if "projector" in self.plan.heads else features
            prediction = self.encoders.predictor(projection) if "predictor" in self.plan.heads else projection
            scores = self.encoders.classifier(features) if "classifier" in self.plan.heads else features[:, :0]
            start = 0
            for view, count in zip(together, counts, strict=True):
                part = slice(start, start + count)
                unit = (normalize(output, dim=1)[part] for output in (projection, prediction))
                online[view] = EncoderOutput(*unit, scores[part])
                start += count
        for together in self.plan.target:
            (view,) = together  # no paper has the target see two views as one batch
            with torch.no_grad():
                f = self.encoders.target
                u = normalize(f.projector(f.backbone(images(together)[0])), dim=1)
            target[view] = EncoderOutput(u, u, u[:, :0])

        seen = target or online
        u = (seen[FIRST] if FIRST in seen else seen[SECOND]).embedding.detach()
        query = Rows(u, index, FEW[index])
        rows = zip(index.tolist(), u, FEW[index].tolist(), strict=True)
        entering = [{"image": image, "u": embedding, "label": label} for image, embedding, label in rows]
        if self.plan.enters == "before":
            self.bank = entered(self.bank, entering)
        named = Rows(online[SUPPORT].embedding.detach(), support, FEW[support]) if SUPPORT in online else None
        loss = self.plan.loss(LossInput(query, bank_of(self.rows(u.shape[1])), online, target, named)).loss
        self.descend(loss)
        if self.plan.enters == "after":
            self.bank = entered(self.bank, entering)
        if self.plan.target:
            follow(self.encoders.target, self.encoders.online)
        return float(loss.detach()), u

    def rows(self, dim: int) -> Rows:
        held = [row for row in self.bank if row]
        embedding = torch.zeros(len(held), dim, dtype=torch.float64)
        for j, row in enumerate(held):
            embedding[j] = row["u"]
        index, label = (torch.tensor([row[name] for row in held], dtype=torch.long) for name in ("image", "label"))
        return Rows(embedding, index, label)


def test_every_baseline_has_a_plan() -> None:
    assert {plan.method or name for name, plan in PLANS.items()} == set(BASELINES)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_of_many_steps_equals_each_baseline_written_out_by_hand(name: str) -> None:
    plan = PLANS[name]
    _, learner = make(plan.method or name, FEW, lr=GENTLE_LR, **plan.changes)
    slow = BaselineByHand(plan, learner)
    losses = []
    for number in range(12):
        epoch, place = divmod(number, IMAGES // BATCH)
        index = batches(epoch)[place]
        support = torch.randperm(7, generator=torch.Generator().manual_seed(number))[:5]  # of those with a label
        beside = WholeBatch(support, SEED, number, PICTURES[support]) if learner.loss_fn.needs_support else None
        query, outcome = learner.step(WholeBatch(index, SEED, epoch, PICTURES[index]), TARGET, beside)
        loss, u = slow.step(index, support, epoch, number)
        losses.append(loss)
        assert float(outcome.loss.detach()) == pytest.approx(loss, abs=ROUNDING)
        torch.testing.assert_close(query.embedding, u, rtol=0, atol=ROUNDING)
    assert len({round(loss, 6) for loss in losses}) > 6  # or there was nothing to tell apart
    # All weights and all of BatchNorm's statistics, of both encoders and the heads.
    expected = slow.encoders.state_dict()
    assert learner.encoders.state_dict().keys() == expected.keys()
    for key, value in learner.encoders.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=ROUNDING, atol=ROUNDING)
    kept = learner.bank.rows()
    images = [int(image) for image in kept.index if image != UNKNOWN]
    assert sorted(images) == sorted(row["image"] for row in slow.bank if row)


@pytest.mark.parametrize("name", PLANS)
def test_a_baseline_has_the_heads_the_views_and_the_target_of_its_paper_and_no_others(name: str) -> None:
    plan = PLANS[name]
    _, learner = make(plan.method or name, FEW, **plan.changes)
    encoders = learner.encoders
    assert isinstance(encoders.online.projector, nn.Identity) == ("projector" not in plan.heads)
    assert isinstance(encoders.predictor, nn.Identity) == ("predictor" not in plan.heads)
    assert (encoders.classifier is None) == ("classifier" not in plan.heads)
    assert (encoders.target is None) == (not plan.target)
    assert learner.bank.size == (0 if plan.enters == "never" else BANK)
    wanted = {view for together in (*plan.online, *plan.target) for view in together}
    assert set(learner.view_crops) == wanted
    assert {view for view in wanted if learner.views[view].jitter} == set(plan.strong)
    assert isinstance(learner.views[SECOND], RandAugment) == (name == "fixmatch")
    layers = [layer for layer in encoders.online.projector.modules() if isinstance(layer, nn.Linear)]
    if "projector" in plan.heads:  # SimSiam's is deeper, with BatchNorm at its end
        assert len(layers) == (3 if name == "simsiam" else 2)
        assert isinstance(encoders.online.projector[-1], nn.BatchNorm1d) == (name == "simsiam")


def test_a_companion_is_last_epochs_embedding_and_stays_with_its_row() -> None:
    _, learner = of_variant("cmsf-self")
    seen: list[dict[int, Tensor]] = []
    for epoch in range(3):
        seen.append({})
        for index in torch.arange(12).split(BATCH):
            query, _ = learner.step(WholeBatch(index, SEED, epoch, PICTURES[index]), TARGET)
            seen[epoch] |= {int(image): u for image, u in zip(index, query.embedding, strict=True)}
            assert query.has_companion.all() == (epoch > 0)
            if epoch:
                expected = torch.stack([seen[epoch - 1][int(image)] for image in index])
                assert torch.equal(query.companion, expected)
        rows = learner.bank.rows()
        if epoch:
            for j in rows.exists.nonzero()[:, 0].tolist():
                assert torch.equal(rows.companion[j], seen[epoch - 1][int(rows.index[j])])


def test_a_third_view_is_neither_of_the_two_others() -> None:
    _, learner = of_variant("cmsf-self by a third view")
    assert isinstance(learner.supervision, ThirdView)
    query, _ = learner.step(WholeBatch(torch.arange(4), SEED, 0, PICTURES[:4]), TARGET)
    assert query.has_companion.all()
    assert ((query.companion - query.embedding).norm(dim=1) > 1e-3).all()
