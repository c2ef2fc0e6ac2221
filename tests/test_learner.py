"""Whole training steps against the method written out by hand, with lists for bank and cache."""

import copy
from dataclasses import asdict, replace

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from cmsf.assembly import make_learner
from cmsf.encoders import Encoders
from cmsf.knowledge import PseudoLabels, ThirdView
from cmsf.learner import EXTRA, STRONG, THIRD, WEAK, Learner
from cmsf.precision import Precision
from cmsf.pseudo_classifiers import _TRAINING
from cmsf.randomness import permutation
from cmsf.recipe import Recipe, Resolved
from cmsf.recipes import METHODS
from cmsf.rows import UNKNOWN, Rows
from cmsf.views import WholeBatch

IMAGES, BATCH, BANK, EPOCHS, SEED = 14, 4, 9, 4, 3
LR, DECAY, MOMENTUM, TARGET = 0.1, 1e-3, 0.9, 0.8
PICTURES = torch.randint(256, (IMAGES, 1, 10, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABEL = torch.arange(IMAGES) % 3
FEW = LABEL.where(torch.arange(IMAGES) < 7, UNKNOWN)
VARIANTS = {
    **{method: {} for method in METHODS},
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


def make(variant: str) -> tuple[Resolved, Learner]:
    changes = dict(VARIANTS[variant])
    recipe = METHODS[changes.pop("method", variant)](
        Recipe(
            size=8,
            bank_size=BANK,
            batch_size=BATCH,
            projection_hidden=7,
            projection_dim=5,
            seed=SEED,
            backbone="small-residual",
            precision="fp64",
        )
    )
    # k and k' small enough to leave somebody out of a bank of nine.
    recipe = replace(recipe, k=recipe.k if recipe.k in (1, "all") else 3, companion_k=4, **changes)
    numbers = {"weak_crop": 0.2, "strong_crop": 0.2, "extra_size": 8, "cache": "ram"}
    resolved = Resolved(**(asdict(recipe) | numbers))
    learner = make_learner(resolved, FEW if "semi" in variant else LABEL, "cpu")
    torch.manual_seed(SEED)
    learner.encoders = Encoders(TinyNet(), 8, 7, 5, Precision("fp64"))
    learner.optimiser = torch.optim.SGD(learner.encoders.learning(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    return resolved, learner


class ByHand:
    """Sec. 2 with a list for the bank, a dictionary for the previous epoch, and SGD written out."""

    def __init__(self, recipe: Recipe, learner: Learner) -> None:
        self.recipe, self.given = recipe, getattr(learner.knowledge, "label", LABEL)
        self.teacher = Teacher(recipe, learner.knowledge) if isinstance(learner.knowledge, PseudoLabels) else None
        self.weak, self.strong, self.extra = learner.weak, learner.strong, learner.extra
        encoders = copy.deepcopy(learner.encoders)
        self.f, self.g, self.h = encoders.target, encoders.online, encoders.predictor
        self.theta = [*self.g.parameters(), *self.h.parameters()]
        self.velocity: list[Tensor | None] = [None] * len(self.theta)
        self.bank: list[dict] = []
        self.previous: dict[int, Tensor] = {}

    def step(self, index: Tensor, epoch: int) -> float:
        def view(augmentation, number: int) -> Tensor:
            return augmentation(WholeBatch(index, SEED, epoch, PICTURES[index]), number).double()

        with torch.no_grad():
            u = normalize(self.f(view(self.weak, WEAK)), dim=1)
            third = normalize(self.f(view(self.weak, THIRD)), dim=1) if self.recipe.companions == "third-view" else None
        predictions = [normalize(self.h(self.g(view(self.strong, STRONG))), dim=1)]
        if self.recipe.extra_crops:  # all crops of a size pass together
            crops = torch.cat([view(self.extra, EXTRA + number) for number in range(self.recipe.extra_crops)])
            predictions += normalize(self.h(self.g(crops)), dim=1).split(len(index))
        entering = []
        for i, image in enumerate(index.tolist()):
            w = third[i] if third is not None else self.previous.get(image, torch.full_like(u[i], torch.nan))
            label = int(self.given[image]) if self.teacher is None else self.teacher.label(image, u[i])
            entering.append({"image": image, "u": u[i], "w": w, "label": label})
            self.previous[image] = u[i]
        self.bank = [None if row and row["image"] in index.tolist() else row for row in self.bank]
        self.bank = (self.bank + entering)[-BANK:]
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

        gradients = torch.autograd.grad(loss, self.theta)
        with torch.no_grad():
            for j, (parameter, gradient) in enumerate(zip(self.theta, gradients, strict=True)):
                change = gradient + DECAY * parameter
                self.velocity[j] = change if self.velocity[j] is None else MOMENTUM * self.velocity[j] + change
                parameter -= LR * self.velocity[j]
            for target, online in zip(self.f.parameters(), self.g.parameters(), strict=True):
                target.copy_(TARGET * target + (1 - TARGET) * online)
        return float(loss.detach())

    @staticmethod
    def _rows(rows: list[dict]) -> Rows:
        index, label = (torch.tensor([row[name] for row in rows]) for name in ("image", "label"))
        return Rows(torch.stack([row["u"] for row in rows]), index, label, torch.stack([row["w"] for row in rows]))


class Teacher:
    """Pseudo-labels by hand: a dictionary of the labelled images' embeddings, and SGD written out."""

    def __init__(self, recipe: Recipe, knowledge: PseudoLabels) -> None:
        self.recipe, self.classifier = recipe, copy.deepcopy(knowledge.classifier)
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


def refuse(index: Tensor) -> Tensor:
    raise AssertionError("embeddings are cached online; nobody asks for a pass of its own")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_of_many_steps_equals_the_method_written_out_by_hand(variant: str) -> None:
    recipe, learner = make(variant)
    slow = ByHand(recipe, learner)
    for epoch in range(EPOCHS):
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
        for number, index in enumerate(order.split(BATCH)[: IMAGES // BATCH]):
            if slow.teacher is not None and (epoch, number) != (0, 0) and number in (0, 2):
                learner.knowledge.refresh(refuse)
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


def test_a_companion_is_last_epochs_embedding_and_stays_with_its_row() -> None:
    _, learner = make("cmsf-self")
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
    _, learner = make("cmsf-self by a third view")
    assert isinstance(learner.knowledge, ThirdView)
    query, _ = learner.step(WholeBatch(torch.arange(4), SEED, 0, PICTURES[:4]), TARGET)
    assert query.has_companion.all()
    assert ((query.companion - query.embedding).norm(dim=1) > 1e-3).all()
