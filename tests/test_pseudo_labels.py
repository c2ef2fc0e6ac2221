"""Pseudo-labels: who gets one, what they are learned from, and that nothing hidden can reach them."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import unit, write_npz, write_photos
from runs import TINY, StopAt, assert_same, assert_same_run, metrics, state
from safetensors.torch import load_file
from torch import Tensor

import cmsf
from cmsf.analysis.pseudo_labels import count_guesses, summarise_guesses
from cmsf.data.sources.table import write_csv
from cmsf.method.pseudo_labels import (
    KNNClassifier,
    MLPClassifier,
    PseudoClassifier,
    PseudoLabelSGD,
    leave_one_out_accuracy,
)
from cmsf.method.rows import Rows
from cmsf.method.supervision import PseudoLabelOutput, PseudoLabels
from cmsf.training.signals import Stopped
from cmsf.utils.constants import UNKNOWN

KINDS = ("mlp-2", "mlp-3", "linear", "knn")
SEMI = TINY | {"labels_per_class": 8, "epochs": 4, "pseudo_threshold": 0.5}


class Scripted(PseudoClassifier):
    """Gives the probabilities it was told, and remembers what it was to learn from."""

    def __init__(self, probability: Tensor) -> None:
        super().__init__()
        self.probability = probability
        self.learned: list[Rows] = []

    def fit(self, rows: Rows, times: int) -> None:
        assert times == len(self.learned)
        self.learned.append(rows)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.probability[: len(embedding)]


def nothing() -> Tensor:
    raise AssertionError("nobody needs another view")


def no_pass(index: Tensor) -> Tensor:
    raise AssertionError("embeddings are cached as they pass")


def scripted(label: list[int], probability: list[list[float]], offline: bool = False) -> PseudoLabels:
    return PseudoLabels(torch.tensor(label), 4, Scripted(torch.tensor(probability)), 0.85, offline, torch.float64)


def test_a_given_label_is_kept_and_others_are_guessed_where_the_classifier_is_sure() -> None:
    supervision = scripted([2, -1, 0, -1, -1], [[0.1, 0.9, 0.0], [0.84, 0.1, 0.06], [0.0, 0.15, 0.85]])
    query = Rows(unit(5, 4, 0), torch.tensor([4, 0, 3, 2, 1]))
    before = supervision(query, nothing)
    assert before.label.tolist() == [-1, 2, -1, 0, -1]  # nothing is guessed before it has learned
    supervision.refresh(no_pass)
    after = supervision(query, nothing)
    assert after.label.tolist() == [1, 2, -1, 0, 2]  # 0.9, given, below 0.85, given, exactly 0.85
    assert supervision.pseudo_labels.index.tolist() == [4, 3, 1]
    assert supervision.pseudo_labels.label.tolist() == [1, 0, 2]
    assert supervision.pseudo_labels.confident.tolist() == [True, False, True]


def test_only_slots_that_were_filled_are_learned_from_and_the_newest_embedding_counts() -> None:
    supervision = scripted([5, -1, 1, 3], [[0.1] * 6])
    first, second = unit(3, 4, 1), unit(1, 4, 2)
    supervision(Rows(first, torch.tensor([2, 1, 0])), nothing)
    supervision(Rows(second, torch.tensor([2])), nothing)
    supervision.refresh(no_pass)
    (rows,) = supervision.classifier.learned
    known = rows[rows.exists]
    assert known.index.tolist() == [0, 2]
    assert known.label.tolist() == [5, 1]
    assert torch.equal(known.embedding, torch.stack([first[2], second[0]]))


def test_offline_caching_learns_from_a_pass_over_the_labelled_images_alone() -> None:
    supervision = scripted([5, -1, 1, 3], [[0.1] * 6], offline=True)
    supervision(Rows(unit(4, 4, 1), torch.arange(4)), nothing)
    asked: list[list[int]] = []
    clean = unit(3, 4, 7)

    def embed(index: Tensor) -> Tensor:
        asked.append(index.tolist())
        return clean

    supervision.refresh(embed)
    assert asked == [[0, 2, 3]]
    (rows,) = supervision.classifier.learned
    assert rows.index.tolist() == [0, 2, 3]
    assert torch.equal(rows.embedding, clean)


def separated(count: int = 60) -> Rows:
    """Three classes around three directions."""
    label = torch.arange(count) % 3
    embedding = torch.nn.functional.normalize(torch.eye(8, dtype=torch.float64)[label] + 0.3 * unit(count, 8, 3), dim=1)
    return Rows(embedding, torch.arange(count), label)


def classifier(kind: str, lr: float = 0.1) -> PseudoClassifier:
    if kind == "knn":
        return KNNClassifier(60, 8, 3, 20, torch.float64)
    hidden = {"linear": 0, "mlp-2": 1, "mlp-3": 2}[kind]
    return MLPClassifier(8, 3, hidden, PseudoLabelSGD(lr=lr), seed=0).double()


@pytest.mark.parametrize("kind", KINDS)
def test_every_classifier_learns_and_gives_probabilities(kind: str) -> None:
    made, rows = classifier(kind), separated()
    made.fit(rows, 0)
    probability = made(rows.embedding)
    assert torch.allclose(probability.sum(1), torch.ones(60, dtype=torch.float64))
    assert (probability >= 0).all()
    assert (probability.argmax(1) == rows.label).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_exist_teach_nothing(kind: str) -> None:
    rows = separated()
    some = torch.arange(60) < 45
    with_holes = Rows(
        rows.embedding.where(some[:, None], torch.nan),
        rows.index.where(some, UNKNOWN),
        rows.label.roll(1).where(~some, rows.label),
    )
    first, second = classifier(kind), classifier(kind)
    first.fit(with_holes, 0)
    second.fit(rows[:45], 0)
    assert torch.equal(first(rows.embedding), second(rows.embedding))


@pytest.mark.parametrize("kind", ["mlp-2", "mlp-3", "linear"])
def test_learning_again_goes_on_from_what_was_learned(kind: str) -> None:
    made, rows = classifier(kind, lr=0.005), separated()
    made.fit(rows, 0)
    once = made(rows.embedding).gather(1, rows.label[:, None]).mean()
    made.fit(rows, 1)
    assert made(rows.embedding).gather(1, rows.label[:, None]).mean() > once + 0.01


def test_few_labels_are_gone_through_more_often_and_many_as_the_paper_does() -> None:
    assert PseudoLabelSGD().batch_and_epochs(128_116) == (256, 10)
    assert PseudoLabelSGD().batch_and_epochs(100) == (100, 20)
    assert PseudoLabelSGD().batch_and_epochs(1000) == (256, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_one_class_alone_are_nothing_to_guess_by(kind: str) -> None:
    made, rows = classifier(kind), separated()
    supervision = PseudoLabels(torch.tensor([0, 0, 1] + [UNKNOWN] * 57), 8, made, 0.0, False, torch.float64)
    supervision(rows[:2], nothing)
    supervision.refresh(no_pass)
    assert supervision(rows[3:], nothing).label.eq(UNKNOWN).all()
    supervision(rows[:3], nothing)
    supervision.refresh(no_pass)
    assert supervision(rows[3:], nothing).label.ne(UNKNOWN).all()


def test_the_vote_is_the_share_of_each_class_among_the_nearest() -> None:
    rows, query = separated(), unit(12, 8, 9)
    vote = KNNClassifier(60, 8, 3, 7, torch.float64)
    vote.fit(rows, 0)
    for vector, shares in zip(query, vote(query), strict=True):
        nearest = sorted(range(60), key=lambda i: (-float(vector @ rows.embedding[i]), i))[:7]
        assert shares.tolist() == pytest.approx([sum(int(rows.label[i]) == c for i in nearest) / 7 for c in range(3)])


def test_guesses_are_counted_by_who_is_sure_and_who_is_right() -> None:
    truth = torch.tensor([0, 1, 2, UNKNOWN, 1, 2])
    guess = PseudoLabelOutput(
        torch.tensor([0, 1, 2, 3, 4]),
        torch.tensor([0, 2, 2, 1, UNKNOWN]),
        torch.tensor([True, True, False, True, False]),
    )
    assert summarise_guesses(2 * count_guesses(guess, truth)) == {
        "pseudo_share": 3 / 5,
        "pseudo_accuracy_confident": 1 / 2,  # images 0 and 1 are sure and can be judged; image 3 cannot
        "pseudo_accuracy_all": 2 / 3,
    }


def left_out(rows: Rows) -> float:
    """Leave-one-out, written out: each labelled row by a majority of its nearest others; equal votes by nearness."""
    known = rows[rows.exists]
    label = known.label.tolist()
    counts = {c: label.count(c) for c in label}
    judged = [i for i in range(len(known)) if counts[label[i]] > 1]
    k = min(20, min(counts[label[i]] for i in judged) - 1)
    right = 0
    for i in judged:
        others = [j for j in range(len(known)) if j != i]
        others.sort(key=lambda j: (-float(known.embedding[i] @ known.embedding[j]), int(known.index[j])))
        votes: dict[int, tuple[int, int]] = {}
        for place, j in enumerate(others[:k]):
            count, nearness = votes.get(label[j], (0, 0))
            votes[label[j]] = count + 1, nearness + k - place
        best = max(votes.values())
        right += label[i] == min(c for c, vote in votes.items() if vote == best)
    return right / len(judged)


@pytest.mark.parametrize("classes", [2, 3, 11])
@pytest.mark.parametrize("seed", [0, 1])
def test_leave_one_out_equals_the_vote_written_out(classes: int, seed: int) -> None:
    rows = Rows(unit(40, 6, seed), torch.arange(40), torch.arange(40) ** 2 % classes)
    rows.index[::7] = UNKNOWN
    assert leave_one_out_accuracy(rows) == pytest.approx(left_out(rows))


def test_leave_one_out_knows_what_can_be_told_apart_and_what_cannot() -> None:
    rows = separated()
    assert leave_one_out_accuracy(rows) == 1
    shuffled = Rows(
        rows.embedding, rows.index, rows.label[torch.randperm(60, generator=torch.Generator().manual_seed(0))]
    )
    assert leave_one_out_accuracy(shuffled) < 0.6
    assert leave_one_out_accuracy(rows[:3]) is None  # one of each class


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.mark.parametrize(("kind", "cache"), [*((kind, "online") for kind in KINDS), ("mlp-2", "offline")])
def test_a_run_says_how_many_images_it_guessed_and_how_well(kind: str, cache: str, bars: Path, tmp_path: Path) -> None:
    settings = SEMI | {"pseudo_labels": kind, "pseudo_cache": cache, "pseudo_threshold": 0.3}
    run = cmsf.train("cmsf-semi-small", bars, tmp_path / "run", quiet=True, **settings)
    epochs = metrics(run, "epoch")
    for line in epochs:
        assert 0 <= line["pseudo_share"] <= 1
        assert line["pseudo_cost"] > 0
        assert 0 <= line["pseudo_trust"] <= 100
    assert epochs[-1]["pseudo_share"] > 0
    assert min(epochs[-1]["pseudo_accuracy_confident"], epochs[-1]["pseudo_accuracy_all"]) > 0.25  # of four classes
    assert int(state(run)["knowledge"]["times_trained"]) == 7  # twice an epoch, but for the end of the last


@pytest.mark.parametrize("cache", ["online", "offline"])
def test_a_stopped_run_with_pseudo_labels_resumes_bit_for_bit(cache: str, bars: Path, tmp_path: Path) -> None:
    settings = SEMI | {"pseudo_cache": cache, "log_every": 1}
    whole = cmsf.train("cmsf-semi-small", bars, tmp_path / "whole", quiet=True, **settings)
    for step in (5, 6, 8):  # before, at and after its classifier is trained again
        with pytest.raises(Stopped):
            cmsf.train("cmsf-semi-small", bars, tmp_path / "parts", screen=StopAt(step, signal.SIGTERM), **settings)
    assert_same_run(whole, cmsf.train("cmsf-semi-small", bars, tmp_path / "parts", quiet=True, **settings))


def test_labels_that_embeddings_cannot_tell_apart_are_warned_of_once_and_change_nothing(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(0).integers(0, 4, 48)
    write_csv(tmp_path / "any.csv", ("path", "label"), [(f"x/{i}", str(number)) for i, number in enumerate(numbers)])
    settings = {name: value for name, value in SEMI.items() if name != "labels_per_class"} | {"epochs": 2}
    keywords = settings | {"labels": tmp_path / "any.csv", "val": bars}
    run = cmsf.train("cmsf-semi-small", bars, tmp_path / "run", **keywords)
    trust = metrics(run, "epoch")[-1]["pseudo_trust"]
    assert trust < 60
    said = capsys.readouterr().err
    warning = f"pseudo-labels are right in about {trust:.0f} % of cases by leave-one-out on the 48 labels given; more"
    assert said.count(warning) == said.count("WARNING") == 1
    assert f"trust {trust:.0f} %" in said
    monkeypatch.setattr(PseudoLabels, "trust", lambda self: None)
    without = cmsf.train("cmsf-semi-small", bars, tmp_path / "without", **keywords)
    assert "WARNING" not in capsys.readouterr().err
    assert_same(load_file(run.folder.backbone_file), load_file(without.folder.backbone_file))
    assert_same(state(run), state(without))
    steps = [[{**line, "images_per_second": 0} for line in metrics(each, "step")] for each in (run, without)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("method", ["cmsf-semi", "cmsf-semi-basic"])
def test_hidden_labels_cannot_reach_the_loss(method: str, bars: Path, tmp_path: Path) -> None:
    """Other truths of the images whose labels are hidden: the same weights, and other figures of analysis."""
    arrays = dict(np.load(bars))
    images, truth = arrays["x"], arrays["y"]
    generator = np.random.default_rng(0)
    labelled = np.concatenate([np.flatnonzero(truth == c)[:8] for c in range(4)])
    hidden = np.setdiff1d(np.arange(len(truth)), labelled)
    other = truth.copy()
    other[hidden] = generator.permutation(truth[hidden])
    rows = [(f"x/{i}", str(truth[i])) for i in labelled]
    write_csv(tmp_path / "some.csv", ("path", "label"), rows)
    found: list[tuple[Any, Any]] = []
    for name, y in (("true", truth), ("false", other)):
        np.savez(tmp_path / f"{name}.npz", x=images, y=y)
        settings = {name: value for name, value in SEMI.items() if name != "labels_per_class"}
        run = cmsf.train(
            f"{method}-small", tmp_path / f"{name}.npz", tmp_path / name, labels=tmp_path / "some.csv", val=bars,
            quiet=True, **settings,
        )  # fmt: skip
        found.append((load_file(run.folder.backbone_file), metrics(run, "epoch")[-1]))
    (true, seen), (false, seen_otherwise) = found
    assert_same(true, false)
    assert seen["loss"] == seen_otherwise["loss"]
    assert seen["purity_constrained"] != seen_otherwise["purity_constrained"]
    if method == "cmsf-semi":
        assert seen["pseudo_share"] == seen_otherwise["pseudo_share"] > 0
        assert seen["pseudo_accuracy_all"] != seen_otherwise["pseudo_accuracy_all"]


def test_never_sure_is_semi_basic_to_the_last_bit(bars: Path, tmp_path: Path) -> None:
    settings = {name: value for name, value in SEMI.items() if name != "pseudo_threshold"}
    never = cmsf.train("cmsf-semi-small", bars, tmp_path / "never", quiet=True, **settings, pseudo_threshold=1.0)
    assert metrics(never, "epoch")[-1]["pseudo_share"] == 0
    basic = cmsf.train("cmsf-semi-basic-small", bars, tmp_path / "basic", quiet=True, **settings)
    assert_same(load_file(never.folder.backbone_file), load_file(basic.folder.backbone_file))


def test_labels_under_other_names_are_learned_and_not_judged(bars: Path, tmp_path: Path) -> None:
    truth = np.load(bars)["y"]
    rows = [(f"x/{i}", f"angle {truth[i]}") for i in range(0, 120, 2)]
    write_csv(tmp_path / "named.csv", ("path", "label"), rows)
    settings = {name: value for name, value in SEMI.items() if name != "labels_per_class"}
    run = cmsf.train("cmsf-semi-small", bars, tmp_path / "run", labels=tmp_path / "named.csv", quiet=True, **settings)
    last = metrics(run, "epoch")[-1]
    assert last["pseudo_share"] > 0
    assert last["pseudo_accuracy_all"] is None


def test_photos_on_the_disk_are_pseudo_labelled_offline_too(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 12, 3)
    settings = SEMI | {"size": 32, "cache": "off", "pseudo_cache": "offline", "batch_size": 8, "labels_per_class": 4}
    run = cmsf.train("cmsf-semi-small", photos, tmp_path / "run", quiet=True, workers=1, **settings)
    assert metrics(run, "epoch")[-1]["pseudo_accuracy_all"] is not None


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (
            None,
            {},
            r"every one of the 144 images has a label, so cmsf-semi-small has no unlabelled ones to use",
        ),
        ({}, {}, r"none of the 144 images has one"),
        (
            {0: "0", 1: "1", 2: "2"},
            {},
            r"no training image of '3' in bars is labelled; label one of each class at least",
        ),
        ({0: "0"}, {}, r"needs two classes or more"),
        (None, {"constraint": "none", "label_share": 0.5}, r"--pseudo-labels mlp-2 needs --constraint label"),
    ],
)
def test_labels_that_cannot_be_learned_from_are_refused_in_one_line(
    labels: dict[int, str] | None, settings: dict[str, Any], message: str, bars: Path, tmp_path: Path
) -> None:
    truth = np.load(bars)["y"]
    file = None
    if labels is not None:
        file = tmp_path / "some.csv"
        rows = [(f"x/{i}", labels.get(int(c), "")) for i, c in enumerate(truth) if i % 2 or int(c) == 0]
        write_csv(file, ("path", "label"), rows)
    with pytest.raises(cmsf.BadInput, match=message):
        cmsf.train("cmsf-semi-small", bars, tmp_path / "run", labels=file, quiet=True, **settings)
    assert not (tmp_path / "run").exists()
