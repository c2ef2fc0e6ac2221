"""`--tune auto`: what cross-validation may see, what it compares, and when it stops."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import images_of_classes, write_npz
from runs import TINY
from test_cli import refusal
from test_few_labels import levels, network
from torch import Tensor, nn

import cmsf
from cmsf.data import Split
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, model_selection
from cmsf.evaluation.finetune import FineTuneSettings, make_classifier, make_head, train_classifier, train_heads
from cmsf.evaluation.folds import stratified_folds
from cmsf.evaluation.linear import LinearClassifier
from cmsf.evaluation.logistic import LogisticFit
from cmsf.evaluation.model_selection import ENOUGH_FOR_WHOLE, Selection, select_mode
from cmsf.evaluation.predict import predict_scores
from cmsf.runs import classifier as runs_classifier
from cmsf.utils.constants import UNKNOWN

LABELS = 30
"""Ten of each of three classes, so six a fold."""
BRIEF = FineTuneSettings(epochs=4, min_steps=0)

pytestmark = pytest.mark.usefixtures("one_thread")


def labelled(count: int, images: int = 60) -> Split:
    """Images of three classes, of which the first are labelled."""
    split = levels(images).train
    return replace(split, label=torch.where(torch.arange(images) < count, split.truth, UNKNOWN))


def extractor() -> FeatureExtractor:
    return FeatureExtractor(network(), Preprocessing(12))


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def script(monkeypatch: pytest.MonkeyPatch, **right: list[int]) -> list[str]:
    """Has the folds come out with so many images right; returns what was trained."""
    folds = [len(rows) for rows in torch.arange(LABELS).split(LABELS // 5)]
    correct = {
        mode: [torch.arange(size) < count for size, count in zip(folds, counts, strict=True)]
        for mode, counts in right.items()
    }
    answers, trained = iter([*correct.get("head", []), *correct.get("whole", [])]), []
    fit = LogisticFit(LinearClassifier(torch.zeros(3, 8), torch.zeros(3)), {}, torch.cat(correct["linear"]))
    monkeypatch.setattr(model_selection, "fit_logistic", lambda *_: fit)
    monkeypatch.setattr(model_selection, "train_heads", lambda *_, **__: trained.append("head"))
    monkeypatch.setattr(model_selection, "train_classifier", lambda *_: trained.append("whole"))
    monkeypatch.setattr(model_selection._CrossValidation, "_correct", lambda *_: next(answers))
    return trained


def select(split: Split) -> Selection:
    return select_mode(extractor(), split, 8, 3, 0, BRIEF)


def test_with_one_label_a_class_it_is_the_linear_layer_and_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = script(monkeypatch, linear=[0] * 5)
    found = select(labelled(3))
    assert (found.mode, trained) == ("linear", [])
    assert found.reason == "linear: 3 labels of 3 classes are too few to compare on"
    assert found.report() == {"reason": found.reason, "held out": {}}


def test_it_chooses_what_is_right_most_often_and_the_cheaper_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_selection, "ENOUGH_FOR_WHOLE", 11)
    trained = script(monkeypatch, linear=[3, 3, 3, 3, 3], head=[2, 4, 2, 4, 3])
    assert (select(labelled(LABELS)).mode, trained) == ("linear", ["head"])
    script(monkeypatch, linear=[3, 3, 3, 3, 3], head=[2, 4, 2, 4, 4])
    found = select(labelled(LABELS))
    assert found.mode == "head"
    assert found.reason == (
        "head: 53.3 % in 5-fold cross-validation on 30 labels, linear 50.0 %, "
        "whole is not tried below 11 labels a class"
    )
    assert found.report()["held out"] == {
        "linear": {"accuracy": 50.0, "images": 30},
        "head": {"accuracy": pytest.approx(160 / 3), "images": 30},
    }


def test_the_whole_network_is_trained_fold_by_fold_until_it_is_clearly_ahead_or_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_selection, "ENOUGH_FOR_WHOLE", 10)
    others = {"linear": [4, 4, 4, 4, 4], "head": [1, 1, 1, 1, 1]}
    trained = script(monkeypatch, **others, whole=[1, 0, 0, 0, 0])  # three of six less: clearly
    found = select(labelled(LABELS))
    assert (found.mode, trained) == ("linear", ["head", "whole"])
    assert found.reason == (
        "linear: 66.7 % in 5-fold cross-validation on 30 labels, head 16.7 %, whole 16.7 % of the first 6"
    )
    trained = script(monkeypatch, **others, whole=[4, 5, 4, 3, 4])  # all folds are needed to say: equal
    assert (select(labelled(LABELS)).mode, trained) == ("linear", ["head", *["whole"] * 5])
    trained = script(monkeypatch, **others, whole=[6] * 5)
    found = select(labelled(LABELS))
    assert (found.mode, trained) == ("whole", ["head", *["whole"] * 2])
    assert found.reason.startswith("whole: 100.0 % of the first 12 in 5-fold")


def test_heads_side_by_side_are_heads_alone_bit_for_bit() -> None:
    split, images = labelled(60), extractor()
    heads = [make_head(8, 3, seed, "head") for seed in (0, 1)]
    train_heads(images.backbone, heads, split, split.label, images, 5, BRIEF)
    for seed, head in enumerate(heads):
        alone = make_classifier(images, 8, 3, seed, "head")
        train_classifier(alone, split, split.label, images, 5, BRIEF, "head")
        assert equal(alone[1], head)


def test_a_held_out_label_cannot_reach_the_head_of_its_fold() -> None:
    split, images = labelled(60), extractor()
    taught = [torch.arange(60) % 5 != fold for fold in range(5)]

    def trained(label: Tensor) -> list[nn.Module]:
        heads = [make_head(8, 3, 0, "head") for _ in taught]
        train_heads(images.backbone, heads, split, label, images, 0, BRIEF, taught=taught)
        return list(heads)

    other = torch.where(taught[0], split.label, (split.label + 1) % 3)
    same = [equal(one, two) for one, two in zip(trained(split.label), trained(other), strict=True)]
    assert same == [True, False, False, False, False]


def test_the_figures_are_those_of_networks_that_have_not_seen_the_fold() -> None:
    split, images = labelled(3 * ENOUGH_FOR_WHOLE), extractor()
    found = select_mode(images, split, 8, 3, 0, BRIEF)
    labels = split.subset(split.labelled)
    expected = []
    for rows in stratified_folds(labels.label):
        alone, taught = make_classifier(images, 8, 3, 0), (~rows).nonzero()[:, 0]
        train_classifier(alone, labels.subset(taught), labels.label[taught], images, 0, BRIEF)
        asked = labels.subset(rows.nonzero()[:, 0])
        expected.append(predict_scores(alone, asked, images).argmax(1) == asked.label)
    count = len(found.correct["whole"])
    assert count >= 6
    assert torch.equal(found.correct["whole"], torch.cat(expected)[:count])
    again = select_mode(extractor(), split, 8, 3, 0, BRIEF)
    assert (again.reason, again.report()) == (found.reason, found.report())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    data = write_npz(place / "bars.npz")
    return cmsf.train("cmsf-self", data, place / "a", quiet=True, **TINY | {"epochs": 1}).path


def test_auto_is_the_default_is_said_and_recorded_and_is_what_it_chose(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draw_neighbours", "draw_confusion", "draw_reliability"):
        monkeypatch.setattr(runs_classifier, name, lambda *_, **__: None)
    _, label = images_of_classes(40, 4, 16)
    few = tmp_path / "few.csv"
    few.write_text("index,label\n" + "".join(f"{i},{name}\n" for i, name in enumerate(label[:30])))
    settings: dict[str, Any] = {"labels": few, "epochs": 2, "device": "cpu", "workers": 0, "rounds": 2}
    auto = cmsf.finetune(run, out=tmp_path / "auto", **settings)
    chosen = json.loads((auto.path / "classifier.json").read_text())["chosen"]
    assert chosen["reason"] in " ".join(capsys.readouterr().err.split())
    assert chosen["held out"].keys() == {"linear", "head"}
    figures = {mode: figure["accuracy"] for mode, figure in chosen["held out"].items()}
    mode = auto.about["tune"]
    assert figures[mode] == max(figures.values())
    assert auto.predict(None)[0].label in auto.classes
    if mode == "linear":
        settings.pop("epochs")
    named = cmsf.finetune(run, out=tmp_path / "named", tune=mode, **settings)
    assert named.about["chosen"] is None
    assert auto.folder.head_file.read_bytes() == named.folder.head_file.read_bytes()


def test_a_linear_layer_alone_refuses_epochs_and_a_word_that_is_no_way_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, "finetune", run, "--tune", "linear", "--epochs", "3", "--out", tmp_path / "c")
    assert "--epochs is for --tune whole and head" in message
    with pytest.raises(cmsf.BadInput, match="invalid value --tune best; use auto, whole, head, linear"):
        cmsf.finetune(run, out=tmp_path / "c", tune="best", quiet=True)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
