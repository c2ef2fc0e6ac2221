"""Baselines as whole runs: what they share with every run, and what is theirs."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import noise, write_npz, write_photos
from runs import TINY, StopAt, assert_same_run, metrics, state

import cmsf
from cmsf.data import Dataset, Split, open_source
from cmsf.data.transforms import Augmentation, Batch, RandAugment, WholeBatch
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.method.losses import FIRST, SECOND, SUPPORT
from cmsf.recipes import BASELINES, get_recipe
from cmsf.training.resolve import resolve
from cmsf.training.signals import Stopped
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

FEW = {"labels_per_class": 8}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.mark.parametrize("method", ["nnclr", "supcon", "xent", "paws", "fixmatch"])
def test_a_stopped_baseline_resumes_bit_for_bit(method: str, bars: Path, tmp_path: Path) -> None:
    settings = TINY | (FEW if method in ("paws", "fixmatch") else {})
    whole = cmsf.train(f"{method}-small", bars, tmp_path / "whole", quiet=True, **settings)
    stop = StopAt(6, signal.SIGTERM)
    with pytest.raises(Stopped):
        cmsf.train(f"{method}-small", bars, tmp_path / "stopped", screen=stop, **settings)
    resumed = cmsf.train(f"{method}-small", bars, tmp_path / "stopped", quiet=True, **settings)
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("method", ["paws", "fixmatch"])
def test_labelled_photos_beside_a_batch_are_read_by_any_number_of_workers(method: str, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=16, classes=3)
    settings = TINY | {"labels_per_class": 4, "size": 16, "cache": "off", "epochs": 2, "batch_size": 8}
    runs = [cmsf.train(f"{method}-small", photos, tmp_path / str(n), workers=n, quiet=True, **settings) for n in (0, 2)]
    assert_same_run(*runs)


@pytest.mark.parametrize("method", ["paws", "fixmatch", "supcon", "proto-nw", "xent"])
def test_hidden_labels_cannot_reach_a_baselines_loss(method: str, bars: Path, tmp_path: Path) -> None:
    listed = tmp_path / "few.csv"
    source = open_source(bars)
    shown = [f"{path},{name}" for path, name in zip(source.train.images.paths, source.train.names, strict=True)][:60]
    listed.write_text("\n".join(["path,label", *shown]) + "\n")
    others = write_npz(tmp_path / "others.npz", labelled=False)
    settings = TINY | {"labels": listed, "quiet": True}
    known = cmsf.train(f"{method}-small", bars, tmp_path / "known", val=bars, **settings)
    hidden = cmsf.train(f"{method}-small", others, tmp_path / "hidden", val=bars, **settings)
    assert [line["loss"] for line in metrics(known)] == [line["loss"] for line in metrics(hidden)]


@pytest.mark.parametrize("method", ["xent", "fixmatch"])
def test_the_classifiers_number_in_training_is_the_one_of_its_predictions(
    method: str, bars: Path, tmp_path: Path
) -> None:
    few = FEW if method == "fixmatch" else {"precision": "fp64"}
    run = cmsf.train(f"{method}-small", bars, tmp_path / "run", val=bars, quiet=True, **TINY, **few)
    classifier = cmsf.Classifier(run.path)
    source = open_source(bars)
    found = classifier.predict(bars, workers=0)
    right = sum(one.label == name for one, name in zip(found, source.train.names, strict=True)) / len(found)
    assert metrics(run, "epoch")[-1]["classifier"] == pytest.approx(100 * right, abs=1e-9)


def test_a_classifier_is_judged_like_everything_else(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("xent-small", bars, tmp_path / "run", quiet=True, **TINY)
    shown = metrics(run, "epoch")[-1]["classifier"]
    assert run.evaluate("classifier") == {"classifier": shown}
    written = run.result("classifier")
    assert written["protocol"]["classes"] == 4
    assert written["measures"]["classifier"]["accuracy"]["low"] <= shown
    # Other images, with other classes among them: those that it knows are judged.
    arrays = dict(np.load(bars))
    np.savez(tmp_path / "others.npz", x=arrays["x"], y=np.where(arrays["y"] == 3, 7, arrays["y"]))
    assert 0 <= run.evaluate("classifier", tmp_path / "others.npz")["classifier"] <= 100
    assert run.result("classifier", tmp_path / "others.npz")["protocol"]["classes"] == 4
    np.savez(tmp_path / "strange.npz", x=arrays["x"], y=arrays["y"] + 10)
    with pytest.raises(BadInput, match=r"no test image of .* has a class that .* knows, such as '0'"):
        run.evaluate("classifier", tmp_path / "strange.npz")
    assert run.references("classifier") == {}
    plain = cmsf.train("msf-small", bars, tmp_path / "plain", quiet=True, **TINY)
    with pytest.raises(BadInput, match="is not a classifier; make one: cmsf finetune"):
        plain.evaluate("classifier")


def test_a_classifier_that_is_not_finished_says_so(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        cmsf.train("xent-small", bars, tmp_path / "run", screen=StopAt(2, signal.SIGINT), **TINY)
    with pytest.raises(BadInput, match="is not finished; give the same cmsf train command again"):
        cmsf.Classifier(tmp_path / "run")


def test_purity_is_of_what_is_chosen_and_of_the_bank_where_nothing_is(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, chooses in (("supcon", False), ("moco-v2", False), ("nnclr", True), ("cmsf-sup", True)):
        run = cmsf.train(f"{method}-small", bars, tmp_path / method, **TINY)
        last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")][-1]
        assert (" in M" in last, " in C" in last, "median rank" in last) == (True, chooses, chooses)
        for line in metrics(run):
            assert "purity_unconstrained" in line
            assert all((name in line) == chooses for name in ("purity_constrained", "rank_mean", "rank_median"))


def test_with_coarse_labels_the_classifiers_figure_is_of_groups_and_says_so(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = tmp_path / "groups.csv"
    groups.write_text("class,group\n0,a\n1,a\n2,b\n3,b\n")
    run = cmsf.train("xent-small", bars, tmp_path / "run", coarse_labels=str(groups), **TINY)
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")][-1]
    assert "% of 2 groups" in last
    assert run.evaluate("classifier") == {"classifier": metrics(run, "epoch")[-1]["classifier"]}


def test_an_objective_without_bank_or_target_has_neither(bars: Path, tmp_path: Path) -> None:
    for method in ("simclr", "simsiam", "xent"):
        run = cmsf.train(f"{method}-small", bars, tmp_path / method, quiet=True, **TINY)
        saved = state(run)
        assert not [name for name in saved["encoders"] if name.startswith("target")]
        assert len(saved["bank"]["index"]) == 0
        assert run.recipe.bank_size == 0
        assert "purity_constrained" not in metrics(run, "epoch")[0]


def test_what_enters_a_bank_after_the_loss_is_there_at_the_end(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("moco-v2-small", bars, tmp_path / "run", quiet=True, **TINY)
    index = state(run)["bank"]["index"]
    assert len(index[index >= 0].unique()) == len(index[index >= 0]) >= 128  # four batches of the last epoch


@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_lars_moves_each_layer_in_proportion_to_its_weights_and_others_by_their_gradient(decay: float) -> None:
    lr, data = 0.5, noise(32, 8)
    changes = {"optimiser": "lars", "lr": lr, "sgd_momentum": 0.0, "weight_decay": decay, "batch_size": 16}
    learner = make_learner(resolve(get_recipe("simclr-small").changed(changes), data, 12), data.train.label, "cpu")
    before = [p.detach().clone() for p in learner.encoders.trainable_parameters()]
    gradients: list[torch.Tensor] = []

    def keep(*_: object) -> None:  # the optimiser changes them
        gradients.extend(p.grad.clone() for p in learner.encoders.trainable_parameters() if p.grad is not None)

    learner.optimizer.register_step_pre_hook(keep)
    assert isinstance(data.train.images, torch.Tensor)
    learner.step(WholeBatch(torch.arange(16), 0, 0, data.train.images[:16]), 0.9)
    for old, now, gradient in zip(before, learner.encoders.trainable_parameters(), gradients, strict=True):
        moved = (now.detach() - old).norm()
        trust = 0.001 * old.norm() / (gradient.norm() + decay * old.norm())
        expected = trust * (gradient + decay * old).norm() if old.ndim > 1 else gradient.norm()
        assert float(moved) == pytest.approx(lr * float(expected), rel=1e-3, abs=1e-6)


def test_every_step_has_other_labelled_images_beside_it_in_other_views(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    step = Learner.step

    def watched(learner: Learner, batch: Batch, momentum: float, support: Batch | None = None) -> Any:
        assert support is not None
        seen.append((support.epoch, tuple(support.index.tolist())))
        return step(learner, batch, momentum, support)

    monkeypatch.setattr(Learner, "step", watched)
    run = cmsf.train("paws-small", bars, tmp_path / "run", quiet=True, support_images=2, **TINY, **FEW)
    assert [key for key, _ in seen] == list(range(12))  # the key that decides the views
    assert len({images for _, images in seen}) == 12
    assert all(len(images) == 4 * 2 for _, images in seen)
    labelled = {
        row["index"] for row in run.folder.listing().rows() if row["split"] == "train" and row["label"] is not None
    }
    assert {image for _, images in seen for image in images} <= labelled


def test_labelled_images_are_seen_as_plainly_as_the_first_view() -> None:
    data = noise(60, 8)
    data = replace(data, train=replace(data.train, label=data.train.label.where(torch.arange(60) < 30, UNKNOWN)))
    views = make_learner(resolve(get_recipe("fixmatch-small"), data, 12), data.train.label, "cpu").views
    assert type(views[SUPPORT]) is type(views[FIRST]) is Augmentation
    assert (views[SUPPORT].jitter, views[SUPPORT].crop) == (0, views[FIRST].crop)
    assert type(views[SECOND]) is RandAugment


@pytest.mark.parametrize(
    ("method", "classes", "labelled", "expected"),
    [
        ("paws", 10, 100, (10, 64)),  # 640 in all
        ("paws", 10, 20, (10, 20)),  # as many as there are
        ("paws", 400, 3, (200, 3)),  # of 200 classes at most
        ("fixmatch", 10, 20, (0, 64)),  # whatever their class
        ("fixmatch", 4, 8, (0, 32)),
    ],
)
def test_the_number_of_labelled_images_beside_a_batch_follows_the_data(
    method: str, classes: int, labelled: int, expected: tuple[int, int]
) -> None:
    truth = torch.arange(classes).repeat_interleave(2 * labelled)
    label = truth.where(torch.arange(len(truth)) % 2 == 0, UNKNOWN)
    names = tuple(map(str, range(classes)))
    split = Split(
        torch.zeros(len(truth), 3, 8, 8, dtype=torch.uint8), [str(i) for i in range(len(truth))], truth, label
    )
    recipe = resolve(get_recipe(f"{method}-small"), Dataset("many", names, names, split, None, "none"), 8)
    assert (recipe.support_classes, recipe.support_images) == expected


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("simclr", {"bank_size": 64}, "simclr keeps no bank, so --bank-size 64 is invalid; use auto"),
        ("moco-v2", {"bank_size": 0}, "info-nce needs a bank, so --bank-size 0 is invalid; use auto"),
        ("simclr", {"extra_crops": 2}, "simclr does not use --extra-crops 2; leave it out"),
        ("simclr", {"k": 7}, "simclr does not use --k 7; leave it out"),
        ("xent", {"constraint": "label", "pseudo_labels": "mlp-2"}, "cross-entropy does not use --constraint label"),
        ("cmsf-self", {"temperature": 0.2}, "mean-shift does not use --temperature 0.2"),
        ("paws", {"labels_per_class": 8, "support_classes": 1}, "so --support-classes 1 is invalid; use 2 or more"),
        ("paws", {"labels_per_class": 8, "support_classes": 0}, "so --support-classes 0 is invalid; use 2 or more"),
        (
            "paws",
            {"labels_per_class": 8, "support_images": 9},
            "--support-images 9 is invalid: '0' has 8 labelled images",
        ),
        (
            "paws",
            {"labels_per_class": 8, "support_classes": 5},
            "--support-classes 5 exceeds the 4 classes with labels",
        ),
        (
            "fixmatch",
            {"labels_per_class": 8, "support_images": 64},
            "there are 32 labelled images; use 1 to 32",
        ),
        ("fixmatch", {}, "every one of the 144 images has a label"),
        ("paws", {}, "every one of the 144 images has a label"),
    ],
)
def test_what_does_not_fit_an_objective_is_refused(
    method: str, settings: dict[str, int], message: str, bars: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        cmsf.train(f"{method}-small", bars, tmp_path / "run", quiet=True, **(TINY | settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [name for name in BASELINES if name in ("xent", "supcon", "proto-nw", "paws")])
def test_a_baseline_that_learns_from_labels_says_so_where_there_are_none(method: str, tmp_path: Path) -> None:
    bare = write_npz(tmp_path / "bare.npz", labelled=False)
    with pytest.raises(BadInput, match="learns from labels, and none of the 160 images has one"):
        cmsf.train(f"{method}-small", bare, tmp_path / "run", quiet=True, **TINY)
