"""Fine-tuning: what the classifier may learn from, what moves, and what is left on the disk."""

import json
import resource
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import images_of_classes, write_npz, write_photos
from runs import TINY
from safetensors.torch import load_file
from test_cli import refusal
from test_few_labels import levels, network

import cmsf
from cmsf.api import _finetune_options
from cmsf.cli import main
from cmsf.data import build_dataset, open_source
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation import FeatureExtractor, finetune
from cmsf.evaluation.finetune import FineTuneSettings, fine_tune, fine_tune_in_rounds, make_classifier
from cmsf.recipes.recipe import Recipe
from cmsf.runs import classifier as runs_classifier
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

SHORT = {"tune": "whole", "epochs": 2, "quiet": True, "device": "cpu", "workers": 0}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the small networks; one test has them all."""
    if "with_pictures" not in request.fixturenames:
        for name in ("draw_neighbours", "draw_confusion", "draw_reliability"):
            monkeypatch.setattr(runs_classifier, name, lambda *_, **__: None)


@pytest.fixture
def with_pictures() -> None:
    return None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    data = write_npz(place / "bars.npz")
    return cmsf.train("cmsf-self", data, place / "a", quiet=True, **TINY | {"epochs": 1}).path


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Labels of 48 of the 160 images."""
    _, label = images_of_classes(40, 4, 16)
    return write_list(tmp_path / "few.csv", label[:48])


def write_list(file: Path, label: Any) -> Path:
    file.write_text("index,label\n" + "".join(f"{i},{name}\n" for i, name in enumerate(label)))
    return file


def contents(classifier: cmsf.Classifier) -> list[bytes]:
    return [file.read_bytes() for file in (classifier.folder.backbone_file, classifier.folder.head_file)]


def test_one_round_is_the_fine_tuning_of_few_labels_bit_for_bit() -> None:
    data, like = levels(60), FeatureExtractor(network(), Preprocessing(12))
    brief = FineTuneSettings(epochs=8, min_steps=0)
    once = fine_tune(like, data.train, data.train.truth, 8, 3, seed=1, settings=brief)
    rounds = make_classifier(like, 8, 3, seed=1)
    assert len(list(fine_tune_in_rounds(rounds, data.train, like, 1, settings=brief))) == 1
    for one, other in zip(once.state_dict().values(), rounds.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_round_two_learns_from_the_labelled_and_the_confident_alone_and_given_labels_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = levels(12)
    label = torch.tensor([0, 1, 2, 0, *[UNKNOWN] * 8])
    split = replace(data.train, label=label)
    asked, taught = [], []
    # Of the eight others, the first is sure to be 2, the second 0.9 exactly, the third just below, the rest at a loss.
    scores = torch.tensor([[0.0, 0, 9], [0, 0, 0], [0, 0, 0], *[[0, 0, 0]] * 5])
    scores[1, 1], scores[2, 1] = np.log(18) + 1e-6, np.log(18) - 1e-3
    everybody = torch.arange(8)
    monkeypatch.setattr(
        finetune, "predict_readable", lambda _, split, __: asked.append(list(split.paths)) or (everybody, scores)
    )
    monkeypatch.setattr(
        finetune, "train_classifier", lambda _, split, label, *__, **___: taught.append((split.paths, label.tolist()))
    )
    first, second = fine_tune_in_rounds(
        torch.nn.Sequential(), split, FeatureExtractor(network(), Preprocessing(12)), 0, rounds=2
    )
    assert asked == [list(split.paths[4:])]
    assert taught == [
        (list(split.paths[:4]), [0, 1, 2, 0]),
        (list(split.paths[:6]), [0, 1, 2, 0, 2, 1]),
    ]
    assert (first.labelled, len(first.pseudo)) == (4, 0)
    assert (second.labelled, second.pseudo.tolist(), second.guess.tolist()) == (4, [4, 5], [2, 1])


def test_each_round_goes_on_from_the_one_before_and_guesses_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    data, like = levels(60), FeatureExtractor(network(), Preprocessing(12))
    split = replace(data.train, label=torch.where(torch.arange(60) < 30, data.train.truth, UNKNOWN))
    classifier, asked = make_classifier(like, 8, 3, seed=0), []
    real = finetune.predict_readable

    def spy(network: torch.nn.Module, *arguments: Any) -> Any:
        asked.append(next(network.parameters()).clone())
        return real(network, *arguments)

    monkeypatch.setattr(finetune, "predict_readable", spy)
    monkeypatch.setattr(finetune, "CONFIDENCE_THRESHOLD", 0.0)
    after = [
        next(classifier.parameters()).clone()
        for _ in fine_tune_in_rounds(
            classifier, split, like, 0, rounds=3, settings=FineTuneSettings().with_overrides(epochs=1)
        )
    ]
    assert [torch.equal(one, other) for one, other in zip(asked, after, strict=False)] == [True, True]
    assert not torch.equal(after[0], after[1])


def test_hidden_truth_cannot_reach_the_classifier(run: Path, place: Path, few: Path, tmp_path: Path) -> None:
    images, label = images_of_classes(40, 4, 16)
    np.savez(tmp_path / "other.npz", x=images, y=np.roll(label, 1))
    one, other = (
        cmsf.finetune(run, few, data, tmp_path / name, rounds=2, **SHORT | {"lr": 0.1, "epochs": 8})
        for name, data in (("one", place / "bars.npz"), ("other", tmp_path / "other.npz"))
    )
    assert one.about["rounds"][1]["confident"] > 0
    assert contents(one) == contents(other)
    assert one.about["rounds"][1]["test accuracy"] != other.about["rounds"][1]["test accuracy"]


@pytest.mark.parametrize("tune", ["head", "linear"])
def test_a_frozen_network_stays_as_it_is_bit_for_bit(run: Path, few: Path, tmp_path: Path, tune: Any) -> None:
    settings = SHORT | {"tune": tune} if tune == "head" else {"tune": tune, "quiet": True}
    classifier = cmsf.finetune(run, few, out=tmp_path / "c", rounds=2, **settings)
    before, after = load_file(run / "backbone.safetensors"), load_file(classifier.folder.backbone_file)
    assert any("running_mean" in name for name in before)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    head = load_file(classifier.folder.head_file)
    assert (list(head) == ["bias", "weight"]) == (tune == "linear")
    assert not torch.equal(
        classifier.network()[1].state_dict()["weight" if tune == "linear" else "0.weight"],
        finetune.make_head(classifier.about["features"], 4, 0, tune).state_dict()[
            "weight" if tune == "linear" else "0.weight"
        ],
    )


def test_a_linear_layer_is_the_one_that_few_labels_finds(
    run: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = partial(FineTuneSettings, min_steps=0)  # of the network, which few-labels tunes besides
    monkeypatch.setattr("cmsf.evaluation.few_labels.FineTuneSettings", brief)
    classifier = cmsf.finetune(run, few, out=tmp_path / "c", tune="linear", quiet=True)
    evaluated = cmsf.Run(run).evaluate("few-labels", lists=[few])
    assert classifier.about["rounds"][0]["test accuracy"] == evaluated["few linear"]
    with pytest.raises(cmsf.BadInput, match="--lr is for --tune whole and head"):
        cmsf.finetune(run, few, out=tmp_path / "d", tune="linear", lr=0.1, quiet=True)


def test_the_same_seed_gives_the_same_classifier_and_another_another(run: Path, few: Path, tmp_path: Path) -> None:
    first, second, third = (
        cmsf.finetune(run, few, out=tmp_path / str(number), seed=seed, **SHORT) for number, seed in enumerate((5, 5, 6))
    )
    assert contents(first) == contents(second)
    assert contents(first) != contents(third)


def test_random_weights_are_not_the_runs_and_depend_on_the_seed(run: Path) -> None:
    def start(seed: int | None, random_weights: bool) -> torch.Tensor:
        settings = _finetune_options(cmsf.Run(run), 1, "whole", random_weights, None, None, seed)
        return next(runs_classifier.starting_network(cmsf.Run(run), settings).parameters())

    assert torch.equal(start(None, False), next(cmsf.load(run).parameters()))
    assert not torch.equal(start(0, True), start(0, False))
    assert torch.equal(start(3, True), start(3, True))
    assert not torch.equal(start(3, True), start(4, True))


@pytest.mark.usefixtures("with_pictures")
def test_a_classifier_is_a_run_with_its_figures_beside(
    run: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "CONFIDENCE_THRESHOLD", 0.0)
    out = tmp_path / "c"
    arguments = ["finetune", run, "--labels", few, "--rounds", "2", "--epochs", "3", "--out", out, "--quiet"]
    arguments += ["--tune", "whole"]
    assert main([*map(str, arguments), "--threads", "1", "--workers", "0"]) == 0
    names = {file.name for file in out.iterdir()}
    assert names >= {"recipe.yaml", "environment.json", "data.parquet", "backbone.safetensors", "neighbours.png"}
    assert names >= {"head.safetensors", "classifier.json", "confusion.csv", "confusion.png", "calibration.png"}
    classifier = cmsf.Classifier(out)
    assert classifier.classes == ("0", "1", "2", "3")
    assert [one["round"] for one in classifier.about["rounds"]] == [1, 2]
    assert "SGD, 3 epochs" in classifier.about["rounds"][0]["course"]  # as asked for, however few the images
    environment = json.loads((out / "environment.json").read_text())
    assert environment["finetuned_from"] == str(run)
    assert environment["labels"] == str(few)
    result = classifier.result("classifier")
    rows = [line.split(",") for line in (out / "confusion.csv").read_text().splitlines()]
    assert rows[0][1:] == [row[0] for row in rows[1:]] == ["0", "1", "2", "3"]
    counts = np.array([[int(cell) for cell in row[1:]] for row in rows[1:]])
    assert result["figures"]["classifier"] == 100 * np.trace(counts) / counts.sum()
    assert result["figures"]["classifier"] == classifier.about["rounds"][1]["test accuracy"]
    assert sum(one["images"] for one in result["calibration"]["bins"]) == counts.sum() == 16
    assert cmsf.Run(out).evaluate("knn", workers=0)["1-nn"] > 0
    again = cmsf.finetune(out, **SHORT)  # with the labels it had
    assert again.path == tmp_path / "c-classifier"
    assert again.about["rounds"][0]["labelled"] == classifier.about["rounds"][0]["labelled"]


def test_all_labelled_makes_one_round_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier = cmsf.finetune(run, out=tmp_path / "c", rounds=2, **SHORT | {"quiet": False, "epochs": 1})
    assert len(classifier.about["rounds"]) == 1
    assert "all training images are labelled, so there is no round 2" in capsys.readouterr().err


def test_labels_of_other_names_are_learned_and_not_judged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = write_list(tmp_path / "moods.csv", ["merry", "sad"] * 10)
    classifier = cmsf.finetune(run, labels, out=tmp_path / "c", **SHORT | {"quiet": False})
    assert classifier.classes == ("merry", "sad")
    assert classifier.about["rounds"][0]["test accuracy"] is None
    assert not (classifier.path / "results").exists()
    assert "no accuracy and no calibration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index,label\n" + "".join(f"{i},\n" for i in range(9)), "none of the 144 training images of bars has a label"),
        ("index,label\n" + "".join(f"{i},2\n" for i in range(9)), "are '2'; a classifier needs two classes"),
        (
            "index,label\n" + "".join(f"{i},{i % 3}\n" for i in range(60)),
            "no training image of '3' in bars is labelled",
        ),
        ("index,label\n0,1\n999,2\n", "1 of 2 rows"),
        ("path,label\nnowhere.png,1\n", "images that are not there (the first is nowhere.png); paths look like x/0"),
        ("file,class\na.png,1\n", "has the columns file, class; it needs path (or index) and label"),
        ("path,lable\nx/0,1\n", "has no column label; a list of labels has path (or index) and label"),
    ],
)
def test_labels_that_will_not_do_are_refused_and_leave_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    labels = tmp_path / "l.csv"
    labels.write_text(text)
    assert message in refusal(capsys, "finetune", run, "--labels", labels, "--out", tmp_path / "c")
    assert list(tmp_path.iterdir()) == [labels]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "invalid value --rounds 0"),
        (["--epochs", "none"], "invalid value --epochs none"),
        (["--lr", "-1"], "--lr -1.0 is out of range"),
        (["--tune", "tail"], "invalid choice: 'tail'"),
        (["--out", "/dev/null/c"], "/dev/null"),
        (["--data", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_flags_that_will_not_do_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refusal(capsys, "finetune", run, "--out", tmp_path / "c", *flags)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_not_written_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds a run already" in refusal(capsys, "finetune", run, "--out", run)
    (tmp_path / "letter.txt").write_text("dear")
    assert "is not empty" in refusal(capsys, "finetune", run, "--out", tmp_path)


def test_a_loss_that_is_not_finite_stops_with_epoch_and_learning_rate(run: Path, few: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"NaN or inf in epoch \d of 2; use a smaller learning rate than --lr 1e\+30"):
        cmsf.finetune(run, few, out=tmp_path / "c", lr=1e30, **SHORT)
    assert list(tmp_path.iterdir()) == [few]


def test_who_is_interrupted_while_writing_leaves_no_folder(
    run: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs_classifier, "draw_reliability", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cmsf.finetune(run, few, out=tmp_path / "c", **SHORT)
    assert list(tmp_path.iterdir()) == [few]


def test_images_that_joined_since_are_refused_for_the_run_may_have_been_trained_on_those_it_would_be_tested_on(
    run: Path, place: Path, few: Path, tmp_path: Path
) -> None:
    arrays = dict(np.load(place / "bars.npz"))
    before = (place / "bars.npz").read_bytes()
    try:
        np.savez(
            place / "bars.npz", x=np.concatenate([arrays["x"][:1], arrays["x"]]), y=np.r_[arrays["y"][:1], arrays["y"]]
        )
        with pytest.raises(BadInput, match=r"have changed since \(160 then, 161 now"):
            cmsf.finetune(run, few, out=tmp_path / "c", **SHORT)
    finally:
        (place / "bars.npz").write_bytes(before)


def test_what_a_run_was_taught_is_never_tested_on(tmp_path: Path) -> None:
    """Unlabelled images, a list for training, and another for fine-tuning."""
    images, label = images_of_classes(50, 4, 16)
    np.savez(tmp_path / "flat.npz", x=images)

    def subset_from_list(name: str, chosen: range) -> Path:
        lines = [f"{i},{label[i]}" for i in chosen]
        (tmp_path / name).write_text("index,label\n" + "\n".join(lines) + "\n")
        return tmp_path / name

    first, second, third = (
        subset_from_list("a.csv", range(80)),
        subset_from_list("b.csv", range(40, 140)),
        subset_from_list("c.csv", range(150, 200)),
    )
    run = cmsf.train(
        "cmsf-semi", tmp_path / "flat.npz", tmp_path / "run", labels=first, quiet=True, **TINY | {"epochs": 1}
    )
    tested = set(run.data().test.paths)
    taught = {run.data().train.paths[i] for i in run.data().train.labelled.tolist()}
    assert len(tested) == 8
    again = cmsf.finetune(run.path, second, out=tmp_path / "again", **SHORT)
    assert set(again.data().test.paths) <= tested
    assert not set(again.data().test.paths) & taught
    other = cmsf.finetune(run.path, third, out=tmp_path / "other", **SHORT)
    assert not set(other.data().test.paths) & taught
    judged = json.loads((other.folder.results / "classifier.json").read_text())["protocol"]["test split"]
    assert judged == "5 of 50 labelled images, held out by seed 0; the run has seen them without their labels"


def test_a_class_keeps_its_last_label(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "bars.npz")
    label = np.load(data)["y"]
    rows = [f"{int(np.flatnonzero(label == c)[0])},{c}" for c in range(4)]
    (tmp_path / "one.csv").write_text("index,label\n" + "\n".join(rows) + "\n")
    for seed in range(20):
        arranged = build_dataset(open_source(data), Recipe(seed=seed), labels=tmp_path / "one.csv")
        assert len(arranged.train.labelled) == 4
        assert len(arranged.test) >= 12


def test_two_that_write_to_one_place_do_not_mix(
    run: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c"
    tune = runs_classifier.tune_in_rounds

    def while_another_finishes(*arguments: Any) -> Any:
        if not out.exists():
            monkeypatch.setattr(runs_classifier, "tune_in_rounds", tune)
            cmsf.finetune(run, few, out=out, seed=1, **SHORT)
        return tune(*arguments)

    monkeypatch.setattr(runs_classifier, "tune_in_rounds", while_another_finishes)
    with pytest.raises(BadInput, match="no longer empty"):
        cmsf.finetune(run, few, out=out, seed=2, **SHORT)
    assert cmsf.Classifier(out).about["seed"] == 1


def test_an_image_that_cannot_be_read_costs_its_guess_and_the_picture_alone(
    tmp_path: Path, with_pictures: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "CONFIDENCE_THRESHOLD", 0.0)
    photos = write_photos(tmp_path / "photos", 12, 3)
    settings = TINY | {"epochs": 1, "size": 32, "cache": "off", "batch_size": 8, "labels_per_class": 3}
    run = cmsf.train("cmsf-semi-small", photos, tmp_path / "run", quiet=True, workers=0, **settings)
    data = run.data()
    broken = next(
        path for path, name in zip(data.train.paths, data.train.label.tolist(), strict=True) if name == UNKNOWN
    )
    (photos / broken).write_bytes(b"no image any more")
    classifier = cmsf.finetune(run.path, out=tmp_path / "c", rounds=2, **SHORT | {"quiet": False})
    assert "the picture of neighbours was not drawn: cannot read 1 image" in capsys.readouterr().err.replace("\n", " ")
    first, second = classifier.about["rounds"]
    assert second["confident"] == first["unlabelled"] - 1


def test_a_classifier_knows_what_it_started_from(run: Path, few: Path, tmp_path: Path) -> None:
    classifier = cmsf.finetune(run, few, out=tmp_path / "c", **SHORT)
    before = classifier.references("knn")["starting weights"]
    assert before == cmsf.Run(run).evaluate("knn")


def test_a_full_disk_is_said_in_one_line_and_leaves_no_folder(
    run: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        message = refusal(
            capsys, "finetune", run, "--labels", few, "--out", tmp_path / "c", "--tune", "linear", "--quiet"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot write" in message
    assert [file.name for file in tmp_path.iterdir()] == ["few.csv"]


def test_scores_that_are_no_numbers_are_no_classifier(run: Path, few: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"diverged"):
        cmsf.finetune(run, few, out=tmp_path / "c", **SHORT | {"lr": 1e15})
    assert not (tmp_path / "c").exists()


def test_a_round_without_anything_new_is_left_out_and_said(
    run: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifier = cmsf.finetune(run, few, out=tmp_path / "c", rounds=3, **SHORT | {"lr": 1e-6, "quiet": False})
    assert len(classifier.about["rounds"]) == 1
    assert classifier.about["rounds"][0]["confident"] is None
    assert "others has a confidence of 0.9 or more, so there is no round 2" in capsys.readouterr().err
