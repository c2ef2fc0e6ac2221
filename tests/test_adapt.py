"""Training from pretrained weights: what changes slowly, what not at all, and that no run ends below its start."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers import write_npz, write_photos
from runs import TINY, StopAt, assert_same_run, metrics, whole_log
from safetensors.torch import load_file, save

import cmsf
from cmsf.analysis.view_agreement import ViewAgreement
from cmsf.cli import main
from cmsf.data.transforms import Preprocessing, WholeBatch
from cmsf.evaluation.features import FeatureExtractor, eval_mode
from cmsf.evaluation.metrics import Estimate, change_estimate
from cmsf.method.build import make_learner
from cmsf.method.learner import Diverged, Learner
from cmsf.method.losses import LossOutput
from cmsf.models.backbones import make_backbone
from cmsf.models.encoders import Encoder
from cmsf.models.weights import save_weights
from cmsf.recipes import get_recipe
from cmsf.recipes.recipe import INPUT_SETTINGS, Recipe, ResolvedRecipe
from cmsf.report.headline import figure_tiles, headline
from cmsf.report.logged_metrics import LoggedMetrics
from cmsf.runs.cost import run_cost
from cmsf.runs.folder import RunFolder
from cmsf.training.best_weights import LabelledQueries, split_labels
from cmsf.training.resolve import resolve
from cmsf.training.signals import Stopped
from cmsf.training.validation import describe_change

CHANGES: dict[str, Any] = TINY | {"checkpoint_every": 1, "log_every": 2}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="module")
def start(bars: Path) -> cmsf.Run:
    """A run whose weights others start from."""
    return cmsf.train("msf-small", bars, bars.parent / "start", quiet=True, **TINY)


def adapt(method: str, bars: Path, start: cmsf.Run, out: Path | None, **changes: Any) -> cmsf.Run:
    return cmsf.train(method, bars, out, init=start.path, **({"quiet": True} | CHANGES | changes))


def resolved(data: cmsf.data.Dataset, **changes: Any) -> ResolvedRecipe:
    recipe = get_recipe("cmsf-self-small").changed(TINY | {"size": 16, "bank_size": 64} | changes)
    return resolve(recipe, data, 16)


def weights(run: cmsf.Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder.backbone_file)


def test_a_run_without_epochs_is_of_the_starting_weights(bars: Path, start: cmsf.Run, tmp_path: Path) -> None:
    run = cmsf.from_weights(start.path, bars, tmp_path / "run", quiet=True)
    before, after = weights(start), weights(run)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (line,) = whole_log(run)
    assert (line["kind"], line["step"], line["epoch"]) == ("start", 0, 0)
    assert run.evaluate("knn") == {name: line[name] for name in ("1-nn", "20-nn", "20-nn weighted")}
    assert run.suspects(least=0.0)
    assert main(["report", str(run.path)]) == 0
    again = cmsf.from_weights(start.path, bars, tmp_path / "run", quiet=True)
    assert again.path == run.path


def test_the_start_is_measured_before_the_first_step(bars: Path, start: cmsf.Run, tmp_path: Path) -> None:
    run = adapt("msf", bars, start, tmp_path / "run", epochs=1, freeze_epochs=0, keep="last")
    first, *others = whole_log(run)
    assert first["kind"] == "start"
    assert not [line for line in others if line["kind"] == "start"]
    assert first["20-nn"] == run.references("knn")["starting weights"]["20-nn"]
    (epoch,) = metrics(run, "epoch")
    assert epoch["20-nn_change"] == pytest.approx(epoch["20-nn"] - first["20-nn"])
    assert epoch["20-nn_change_low"] <= epoch["20-nn_change"] <= epoch["20-nn_change_high"]


def test_the_change_of_paired_shares_is_agresti_and_mins() -> None:
    before = torch.tensor([True] * 30 + [False] * 20 + [True] * 5 + [False] * 15)
    after = torch.tensor([True] * 30 + [False] * 20 + [False] * 5 + [True] * 15)
    cells = {(old, new): 0.5 for old in (True, False) for new in (True, False)}
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        cells[old, new] += 1
    total = sum(cells.values())
    difference = (cells[False, True] - cells[True, False]) / total
    variance = ((cells[False, True] + cells[True, False]) / total - difference**2) / total
    found = change_estimate(before, after)
    assert found.value == pytest.approx(100 * 10 / 70)
    assert (found.low, found.high) == pytest.approx(
        (100 * (difference - 1.959964 * variance**0.5), 100 * (difference + 1.959964 * variance**0.5)), abs=1e-4
    )
    same = change_estimate(before, before)
    assert (same.value, same.low) == (0, -same.high)


def test_a_frozen_backbone_keeps_its_weights_and_its_heads_learn(bars: Path, start: cmsf.Run, tmp_path: Path) -> None:
    run = adapt("cmsf-self", bars, start, tmp_path / "run", epochs=2, freeze_epochs=1, keep="last", evaluate_every=1)
    before, after = metrics(run, "start")[0], metrics(run, "epoch")
    assert after[0]["20-nn"] == before["20-nn"]
    assert after[0]["loss"] != after[1]["loss"]
    changed = [name for name, value in weights(run).items() if not torch.equal(value, weights(start)[name])]
    assert any(name.endswith("weight") for name in changed)
    assert not [name for name in changed if "running" in name or "num_batches" in name]  # --batch-norm frozen


def test_frozen_statistics_stay_so_after_an_evaluation() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout())
    encoder = Encoder(network, torch.nn.BatchNorm1d(4), frozen_statistics=True)

    def modes() -> list[bool]:
        return [module.training for module in (network, network[0], network[1], network[2], encoder.projector)]

    assert modes() == [True, True, False, True, True]
    with eval_mode(network):
        assert modes() == [False, False, False, False, True]
    assert modes() == [True, True, False, True, True]
    assert [module.training for module in (encoder.eval(), network[1], encoder.train(), network[1])] == [
        True, False, True, False
    ]  # fmt: skip  # encoder is one object, training again when it is looked at


def test_each_layer_learns_slower_than_the_one_above_it_and_the_heads_fastest() -> None:
    data = cmsf_noise()
    recipe = resolved(data, optimiser="adamw", layer_decay=0.5, weight_decay=0.1)
    learner = make_learner(recipe, data.train.label, "cpu")
    groups = learner.optimizer.param_groups
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    online = learner.encoders.online
    assert len(scale) == len(learner.encoders.trainable_parameters()) == sum(len(group["params"]) for group in groups)
    heads = [*online.projector.parameters(), *learner.encoders.predictor.parameters()]
    assert {scale[id(parameter)] for parameter in heads} == {1.0}
    stem, last = online.backbone.stem[0].weight, online.backbone.blocks[-1].body[0].weight
    assert (scale[id(stem)], scale[id(last)]) == (0.5**4, 1.0)  # a stem and four blocks
    assert all(decay[id(p)] == (0.1 if p.ndim > 1 else 0) for p in learner.encoders.trainable_parameters())


def test_the_gradient_is_clipped_to_its_largest_norm() -> None:
    data = cmsf_noise()
    learner = make_learner(resolved(data, clip_grad=0.01, lr=1.0, sgd_momentum=0.0), data.train.label, "cpu")
    parameters = learner.encoders.trainable_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    learner.optimizer.param_groups[0]["weight_decay"] = 0.0
    learner.optimizer_step(LossOutput(sum(100 * parameter.square().sum() for parameter in parameters), {}))
    moved = torch.stack([(new - old).norm() for new, old in zip(parameters, before, strict=True)]).norm()
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("extra_crops", [0, 2])
@pytest.mark.parametrize("constraint", ["none", "companion", "label"])
def test_a_batch_in_parts_takes_the_step_of_the_whole_batch(constraint: str, extra_crops: int) -> None:
    data = cmsf_noise()
    images = data.train.images
    assert isinstance(images, torch.Tensor)
    settings = {"constraint": constraint, "extra_crops": extra_crops, "precision": "fp64", "batch_size": 24}
    learners = [make_learner(resolved(data, accumulate=parts, **settings), data.train.label, "cpu") for parts in (1, 4)]
    outputs = []
    for learner in learners:
        learner.encoders.eval()  # BatchNorm would see a part at a time
        for step in range(4):
            index = torch.randperm(72, generator=torch.Generator().manual_seed(step))[:24]
            outputs.append(learner.step(WholeBatch(index, 0, step, images[index]), 0.9)[1])
    assert [float(output.loss.detach()) for output in outputs[:4]] == pytest.approx(
        [float(output.loss) for output in outputs[4:]]
    )
    whole, parts = (learner.encoders.state_dict() for learner in learners)
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[name], rtol=1e-9, atol=1e-12)
    before = make_learner(resolved(data, **settings), data.train.label, "cpu").encoders.state_dict()
    assert not torch.equal(before["online.backbone.stem.0.weight"], whole["online.backbone.stem.0.weight"])


def test_losses_whose_gradient_needs_all_predictions_refuse_parts(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("simclr", "nnclr", "supcon"):
        command = ["train", f"{method}-small", "--data", str(bars), "--out", str(tmp_path / "run"), "--accumulate", "2"]
        assert main(command) == 2
        objective = get_recipe(f"{method}-small").objective
        message = f"for losses that are linear in the predictions, as mean shift is, and {objective} is not"
        assert message in capsys.readouterr().err


def cmsf_noise(images: int = 72) -> Any:
    from helpers import noise

    return noise(images, 8)


@pytest.mark.usefixtures("one_thread")
def test_a_stopped_adaptation_goes_on_bit_for_bit(bars: Path, start: cmsf.Run, tmp_path: Path) -> None:
    settings = {"epochs": 3, "freeze_epochs": 1, "evaluate_every": 1, "lr": 0.01}
    whole = adapt("cmsf-sup", bars, start, tmp_path / "whole", **settings)
    with pytest.raises(Stopped):
        adapt("cmsf-sup", bars, start, tmp_path / "half", quiet=False, screen=StopAt(6, signal.SIGTERM), **settings)
    half = adapt("cmsf-sup", bars, start, tmp_path / "half", **settings)
    assert_same_run(whole, half)
    assert metrics(whole, "kept") == metrics(half, "kept")


def test_training_that_harms_ends_with_the_starting_weights(
    bars: Path, start: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = adapt("cmsf-self", bars, start, tmp_path / "run", quiet=False, lr=0.02, clip_grad=0.0, layer_decay=1.0)
    best = max(metrics(run, "epoch"), key=lambda line: line["held_out"])
    kept = metrics(run, "kept")[0]
    before = metrics(run, "start")[0]
    assert best["held_out"] <= before["held_out"]  # or else nothing is shown here
    assert kept["epoch"] == 0
    assert all(torch.equal(value, weights(start)[name]) for name, value in weights(run).items())
    assert "kept: the starting weights" in capsys.readouterr().err


@pytest.mark.parametrize(("right", "kept"), [((20, 24, 23), 0), ((20, 32, 36), 2), ((20, 36, 32), 1)])
def test_an_epoch_is_kept_only_if_it_is_better_than_the_start_beyond_the_interval(
    right: tuple[int, ...],
    kept: int,
    bars: Path,
    start: cmsf.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge_by(monkeypatch, right)
    run = adapt("cmsf-sup", bars, start, tmp_path / "run", epochs=2, lr=0.003, evaluate_every=1)
    (line,), lines = metrics(run, "kept"), [*metrics(run, "start"), *metrics(run, "epoch")]
    assert [line["view_agreement"] for line in lines] == [100 * count / 50 for count in right]
    assert (line["epoch"], line["view_agreement"]) == (kept, 100 * right[kept] / 50)
    assert run.evaluate("knn")["20-nn"] == line["20-nn"] == lines[kept]["20-nn"]


def judge_by(monkeypatch: pytest.MonkeyPatch, right: tuple[int, ...]) -> None:
    """Lets so many of fifty images that judge be right, at the start and after each epoch."""
    measured = iter((torch.arange(50) < count).double() for count in right)
    monkeypatch.setattr(ViewAgreement, "__call__", lambda self, extractor: next(measured))


def test_a_classifier_that_is_trained_along_is_of_the_kept_epoch(
    bars: Path, start: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, (5, 20, 40, 30))
    run = adapt("xent", bars, start, tmp_path / "run", epochs=3, lr=0.02, evaluate_every=1)
    (kept,) = metrics(run, "kept")
    assert (kept["epoch"], kept["view_agreement"]) == (2, 80.0)
    assert run.evaluate("classifier")["classifier"] == kept["classifier"]


def test_labels_that_judge_are_a_fifth_of_each_class_and_never_seen_by_training() -> None:
    data = cmsf_noise(600)
    label = torch.arange(600) % 3
    label[label == 2] = -1
    label[2] = 2  # a class with one label
    data = cmsf_replace_label(data, label)
    training, judge = split_labels(resolved(data, constraint="label", keep="best"), data)
    assert judge is not None
    queries = judge.measure
    assert isinstance(queries, LabelledQueries)
    asked, voters = (
        {queries.images.paths[i] for i in chosen.nonzero()[:, 0].tolist()} for chosen in (queries.asks, queries.votes)
    )
    hidden = {data.train.paths[i] for i in ((label != -1) & (training.train.label == -1)).nonzero()[:, 0].tolist()}
    known = {data.train.paths[i] for i in (label != -1).nonzero()[:, 0].tolist()}
    assert (asked, voters) == (hidden, known - hidden)
    assert [int((label[[int(path) for path in asked]] == number).sum()) for number in range(3)] == [40, 40, 0]
    assert judge.note.startswith("80 of 401 labels judge the epochs and are not trained with")
    unchanged, judge = split_labels(resolved(data, constraint="companion", keep="best"), data)
    assert unchanged is data
    assert judge is not None
    assert (int(judge.measure.asks.sum()), judge.measure.votes.all()) == (400, True)  # the one label has no other
    assert split_labels(resolved(data, keep="last"), data) == (data, None)


@pytest.mark.parametrize(("images", "labels", "constraint"), [(600, 57, "label"), (72, 72, "label"), (72, 9, "none")])
def test_where_labels_are_few_none_is_held_out_and_views_judge(images: int, labels: int, constraint: str) -> None:
    data = cmsf_noise(images)
    label = torch.arange(images) % 3
    label[labels:] = -1
    data = cmsf_replace_label(data, label)
    unchanged, judge = split_labels(resolved(data, constraint=constraint, keep="best"), data)
    assert unchanged is data
    assert judge is not None
    assert judge.name == "view_agreement"


def test_five_thousand_labels_at_most_judge_and_the_others_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmsf.training.best_weights._MOST", 60)
    data = cmsf_noise(600)
    for constraint, voters in (("companion", 600), ("label", 480)):
        _, judge = split_labels(resolved(data, constraint=constraint, keep="best"), data)
        assert judge is not None
        assert (int(judge.measure.asks.sum()), int(judge.measure.votes.sum())) == (60, voters)


def cmsf_replace_label(data: Any, label: torch.Tensor) -> Any:
    from dataclasses import replace

    return replace(data, train=replace(data.train, label=label))


@pytest.mark.parametrize("constraint", ["companion", "label"])
def test_held_out_accuracy_is_the_vote_of_the_nearest_others(constraint: str) -> None:
    data = cmsf_noise(300)
    _, judge = split_labels(resolved(data, constraint=constraint, keep="best"), data)
    assert judge is not None
    queries = judge.measure
    network = torch.nn.Sequential(torch.nn.AvgPool2d(3), torch.nn.Flatten())
    features = FeatureExtractor(network, Preprocessing(12))
    vectors, label = features(queries.images).numpy(), queries.images.label.numpy()
    right = []
    for i in queries.asks.nonzero()[:, 0].tolist():
        voters = [j for j in queries.votes.nonzero()[:, 0].tolist() if j != i]
        order = sorted(voters, key=lambda j: (-float(vectors[i] @ vectors[j]), j))[:20]
        votes = np.bincount(label[order], np.exp(vectors[order] @ vectors[i] / 0.07), minlength=3)
        right.append(float(votes.argmax() == label[i]))
    assert queries(features).tolist() == right
    assert 0 < sum(right) < len(right)


def test_a_bare_method_with_weights_is_adapt_and_a_run_that_is_there_keeps_its_scale(
    bars: Path,
    start: cmsf.Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = adapt("msf", bars, start, tmp_path / "run", epochs=1)
    assert (run.recipe.name, run.recipe.backbone) == ("msf-adapt", "small-residual")
    old = adapt("msf-small", bars, start, tmp_path / "old", epochs=1)
    again = adapt("msf", bars, start, tmp_path / "old", epochs=1)
    assert again.recipe == old.recipe
    monkeypatch.chdir(tmp_path)  # where runs/ has the place of those that are not named
    old = adapt("msf-small", bars, start, None, epochs=1)
    assert adapt("msf", bars, start, None, epochs=1).path == old.path
    assert adapt("msf", bars, old, None, epochs=1).path == Path("runs/msf-adapt")  # from other weights
    command = ["train", "--data", str(bars), "--out", str(tmp_path / "none"), "--quiet"]
    assert main([*command, "msf-adapt"]) == 2
    assert "msf-adapt starts from weights that others have trained; add --init" in capsys.readouterr().err
    for flags, message in (
        (["msf-small", "--epochs", "2", "--freeze-epochs", "3"], "--freeze-epochs 3 leaves none of --epochs 2"),
        (["cmsf-sup-small", "--keep", "best", "--k", "all"], "--keep best holds labels out of training"),
        (["msf-adapt", "--backbone", "small-residual"], "msf-adapt starts from weights that others have trained"),
        (["msf-small", "--batch-norm", "frozen"], "random ones have none; add --init"),
        (["msf-small", "--optimiser", "lars", "--layer-decay", "0.5"], "lars does not use --layer-decay 0.5"),
        (["msf-small", "--optimiser", "adamw", "--sgd-momentum", "0.5"], "adamw does not use --sgd-momentum 0.5"),
    ):
        assert main([*command, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_labels_epochs_are_judged_by_the_agreement_of_views(
    start: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_npz(tmp_path / "unlabelled.npz", labelled=False)
    run = adapt("msf", images, start, tmp_path / "run", epochs=2, evaluate_every=1, quiet=False)
    lines = [*metrics(run, "start"), *metrics(run, "epoch")]
    (kept,) = metrics(run, "kept")
    assert kept["view_agreement"] == max(line["view_agreement"] for line in lines)
    assert "agreement of views" in capsys.readouterr().err
    few = write_npz(tmp_path / "few.npz", per_class=10, labelled=False)
    with pytest.raises(cmsf.BadInput, match=r"nothing to judge by.*views of 40 images say too little"):
        adapt("msf", few, start, tmp_path / "few", keep="best")
    for _ in range(2):  # which nobody asked for is no reason to refuse; and the same command goes on with that
        assert adapt("msf", few, start, tmp_path / "few", quiet=False).recipe.keep == "last"
        assert "views of 40 images say too little (from 50 on they do), so the last epoch is kept" in (
            capsys.readouterr().err
        )


def test_without_labels_the_agreement_of_views_tells_what_became_of_the_start(
    start: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_npz(tmp_path / "unlabelled.npz", labelled=False)
    settings = {"epochs": 2, "evaluate_every": 1, "keep": "last", "quiet": False}
    run = adapt("msf", images, start, tmp_path / "run", **settings)
    (first,), epochs = metrics(run, "start"), metrics(run, "epoch")
    for line in epochs:
        assert line["view_agreement_change"] == pytest.approx(line["view_agreement"] - first["view_agreement"])
    said = describe_change({name: value for name, value in epochs[-1].items() if "agreement" in name})
    assert said.startswith(f"agreement of views {first['view_agreement']:.2f} → {epochs[-1]['view_agreement']:.2f} %")
    assert said in capsys.readouterr().err
    assert headline(LoggedMetrics.read(run), 2).startswith(said.capitalize()[:20])
    with pytest.raises(Stopped):
        adapt("msf", images, start, tmp_path / "half", **settings | {"screen": StopAt(6, signal.SIGTERM)})
    assert metrics(adapt("msf", images, start, tmp_path / "half", **settings), "epoch")[-1].keys() == epochs[-1].keys()


def test_view_agreement_counts_the_neighbours_that_two_crops_share() -> None:
    split = cmsf_noise().train
    network = torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten())
    views: list[torch.Tensor] = []

    def watched(images: torch.Tensor) -> torch.Tensor:
        views.append(network(images))
        return views[-1]

    class Watched(torch.nn.Module):
        forward = staticmethod(watched)

    found = ViewAgreement.of(split, seed=3)(FeatureExtractor(Watched(), Preprocessing(12)))
    first, second = (torch.nn.functional.normalize(view, dim=1).double().numpy() for view in views)
    shares = []
    for i in range(len(split)):
        near = [
            set(sorted((j for j in range(len(split)) if j != i), key=lambda j: -float(view[i] @ view[j]))[:20])
            for view in (first, second)
        ]
        shares.append(len(near[0] & near[1]) / 20)
    assert found.tolist() == pytest.approx(shares)
    assert 0 < np.mean(shares) < 1


def test_commands_take_weights_instead_of_a_run(
    bars: Path, start: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights_of_start = ["--init", str(start.path), "--data", str(bars)]
    assert main(["evaluate", *weights_of_start]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    run = cmsf.Run(made)
    assert run.recipe.epochs == 0
    assert f"{run.result()['figures']['20-nn']:.2f}" in capsys.readouterr().out
    assert main(["suspects", *weights_of_start, "--least", "0"]) == 0
    assert (tmp_path / "suspects.csv").exists()
    assert main(["finetune", *weights_of_start, "--tune", "linear"]) == 0
    assert cmsf.Classifier(f"{run.path}-classifier").classes
    assert main(["embed", *weights_of_start]) == 0
    assert (tmp_path / "features.parquet").exists()
    assert main(["report", *weights_of_start]) == 0
    assert run.folder.report_file.exists()
    capsys.readouterr()
    for arguments, message in (
        (["suspects"], "the following arguments are required: RUN; see cmsf suspects --help"),
        (["evaluate"], "the following arguments are required: RUN; see cmsf evaluate --help"),
        (["report", "--init", str(start.path)], "needs images; add --data SOURCE"),
        (["finetune", str(start.path), *weights_of_start], "not both"),
        (["evaluate", str(start.path), "--backbone", "resnet18"], "--backbone is for weights without a run"),
        (["report", str(start.path), "--data", str(bars)], "a run has its own images; leave --data"),
        (["evaluate", *weights_of_start, "--with", "transfer", "--suite", "none.yaml"], "none.yaml"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_weights_without_a_run_have_a_folder_for_each_set_of_images_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_photos(tmp_path / "photos", per_class=6, classes=2, side=20))
    torch.manual_seed(0)
    for name, network in (("a", make_backbone("small-residual")), ("b", make_backbone("small-residual"))):
        (tmp_path / name).mkdir()
        save_weights(network, tmp_path / name / "w.safetensors")

    def folder(weights: str = "a", **changes: Any) -> Path:
        init, named = tmp_path / weights / "w.safetensors", {"backbone": "small-residual", "size": 16}
        return cmsf.from_weights(init, ".", quiet=True, **(named | changes)).path

    first = folder()
    assert folder() == first  # the run below the photos is none of them
    others = [folder("b"), folder(size=20)]
    next(Path().glob("*/*.jpg")).unlink()
    others.append(folder())
    assert len({first, *others}) == 4
    assert all(path.name.startswith("w-photos-") for path in (first, *others))


def test_a_network_in_memory_becomes_a_run(bars: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    network = timm.create_model("resnet10t", num_classes=0)
    run = cmsf.from_weights(network, bars, tmp_path / "run", quiet=True)
    assert run.recipe.backbone == "resnet10t"
    assert all(torch.equal(value, weights(run)[name]) for name, value in network.state_dict().items())
    assert cmsf.from_weights(network, bars, tmp_path / "run", quiet=True).path == run.path
    before = run.folder.path.with_name("run.safetensors").read_bytes()
    with pytest.raises(cmsf.BadInput, match="holds something else than this network"):
        cmsf.from_weights(timm.create_model("resnet10t", num_classes=0), bars, tmp_path / "run")
    assert run.folder.path.with_name("run.safetensors").read_bytes() == before
    network.pretrained_cfg |= {"mean": (0.5, 0.4, 0.3), "interpolation": "bilinear"}
    recipe = cmsf.from_weights(network, bars, tmp_path / "other", quiet=True).recipe
    assert (recipe.mean, recipe.interpolation) == ("0.5,0.4,0.3", "bilinear")
    with pytest.raises(cmsf.BadInput, match="add backbone, timm's name of it"):
        cmsf.from_weights(torch.nn.Linear(2, 2), bars, tmp_path / "none")
    with pytest.raises(cmsf.BadInput, match="add out, the run folder"):
        cmsf.from_weights(network, bars)


def test_a_picture_that_cannot_be_read_is_left_out_of_an_evaluation_of_weights(
    start: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_photos(tmp_path / "photos", per_class=8, classes=2, side=20)
    next(photos.glob("*/*.jpg")).write_bytes(b"no picture")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--init", str(start.path), "--data", str(photos)]) == 0


def test_a_damaged_file_of_the_start_is_no_reason_to_refuse_a_checkpoint(
    bars: Path, start: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"epochs": 3, "keep": "last", "evaluate_every": 1}
    with pytest.raises(Stopped):
        adapt("msf", bars, start, tmp_path / "run", screen=StopAt(6, signal.SIGTERM), **settings)
    for content, step in ((b"damaged", 8), (save({"20-nn": torch.tensor([True])}), 10)):
        RunFolder(tmp_path / "run").start_file.write_bytes(content)
        with pytest.raises(Stopped):
            adapt("msf", bars, start, tmp_path / "run", screen=StopAt(step, signal.SIGTERM), **settings)
    run = adapt("msf", bars, start, tmp_path / "run", quiet=False, **settings)
    last = metrics(run, "epoch")[-1]
    assert last["epoch"] == 2
    assert "20-nn_change" not in last
    assert "what has changed since the start is not told" in capsys.readouterr().err


def test_a_run_that_diverges_leaves_its_best_epoch(
    bars: Path, start: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, (5, 40, 30))
    step = Learner.step
    monkeypatch.setattr(Learner, "step", lambda self, batch, *more: fail_in_epoch_two(step, self, batch, *more))
    with pytest.raises(cmsf.BadInput, match=r"epoch 1, the best so far, is in .*best\.safetensors"):
        adapt("cmsf-sup", bars, start, tmp_path / "run", epochs=3, lr=0.003, evaluate_every=1)
    best = cmsf.from_weights(tmp_path / "run" / "best.safetensors", bars, tmp_path / "best", quiet=True)
    (line,) = [line for line in whole_log(cmsf.Run(tmp_path / "run")) if line.get("view_agreement") == 80]
    assert best.evaluate("knn")["20-nn"] == line["20-nn"]


def fail_in_epoch_two(step: Any, learner: Learner, batch: Any, *more: Any) -> Any:
    if batch.epoch == 2:
        raise Diverged("the loss is nan")
    return step(learner, batch, *more)


def test_a_file_of_a_small_stem_says_so(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train(
        "msf-small", bars, tmp_path / "stem", quiet=True, backbone="resnet18", stem="small", **TINY | {"epochs": 1}
    )
    again = cmsf.from_weights(run.folder.backbone_file, bars, tmp_path / "again", quiet=True)
    assert (again.recipe.backbone, again.recipe.stem) == ("resnet18", "small")
    assert again.evaluate("knn") == run.evaluate("knn")


def test_a_recipe_older_than_the_preprocessing_of_weights_trains_again_as_it_did(bars: Path, start: cmsf.Run) -> None:
    old = yaml.safe_load(start.folder.recipe_file.read_text())
    for name in INPUT_SETTINGS:
        del old[name]
    assert Recipe.from_values(old, "recipe.yaml").mean == ResolvedRecipe.usual()["mean"]
    assert Recipe.from_values({"init": "x.pth", "size": 32}, "recipe.yaml").mean == "auto"  # written by hand


CHANGE = {"20-nn_change": 4.0, "20-nn_change_low": 1.0, "20-nn_change_high": 7.0}


@pytest.mark.parametrize(
    ("start", "epochs", "kept", "said"),
    [
        ({}, [{"20-nn": 64.0}], {}, ""),  # of an earlier version, which did not measure its start
        ({"loss": 1.0}, [{"loss": 1.0}], {}, ""),
        ({"20-nn": 60.0}, [], {}, "20-NN 60.00 % at the start; no epoch was measured yet."),
        (
            {"20-nn": 60.0},
            [{"20-nn": 64.0} | CHANGE],
            {},
            "20-NN 60.00 → 64.00 % (+4.00, 95 % interval +1.00 to +7.00): better than the start.",
        ),
        (
            {"20-nn": 60.0, "held_out": 50.0},
            [{"20-nn": 64.0, "held_out": 55.0} | CHANGE, {"20-nn": 58.0, "held_out": 54.0}],
            {"epoch": 1, "20-nn": 64.0, "held_out": 55.0} | CHANGE,
            "20-NN 60.00 → 64.00 % (+4.00, 95 % interval +1.00 to +7.00): better than the start; "
            "epoch 1 of 5 was kept.",
        ),
        (
            {"20-nn": 60.0, "held_out": 50.0},
            [{"20-nn": 64.0, "held_out": 51.0} | CHANGE, {"20-nn": 58.0, "held_out": 49.0}],
            {"epoch": 0, "20-nn": 60.0, "held_out": 50.0},
            "The starting weights were kept: no epoch was clearly better. The best other, epoch 1: held-out labels "
            "50.00 → 51.00 %; 20-NN 60.00 → 64.00 % (+4.00, 95 % interval +1.00 to +7.00): better than the start.",
        ),
        (
            {"view_agreement": 40.0},
            [{"view_agreement": 45.0}],
            {"epoch": 1, "view_agreement": 45.0},
            "Agreement of views 40.00 → 45.00 %, no labels to measure k-NN by; epoch 1 of 5 was kept.",
        ),
        (
            {"held_out": 40.0},
            [{"held_out": 45.0}],
            {"epoch": 0, "held_out": 40.0},
            "The starting weights were kept: no epoch was clearly better. The best other, epoch 1: held-out labels "
            "40.00 → 45.00 %, no labelled test images to measure k-NN by.",
        ),
    ],
)
def test_the_first_line_of_the_page_says_what_became_of_the_start(
    start: dict[str, float], epochs: list[dict[str, float]], kept: dict[str, float], said: str
) -> None:
    lines = [{"epoch": number} | line for number, line in enumerate(epochs)]
    assert headline(LoggedMetrics({"epoch": 0} | start if start else {}, lines, kept), 5) == said


def test_the_first_line_of_a_run_without_training_has_the_interval_that_was_evaluated() -> None:
    logged = LoggedMetrics({"epoch": 0, "20-nn": 60.0})
    assert headline(logged, 0) == "20-NN 60.00 % of the starting weights, no training."
    evaluated = Estimate(60.0, 55.0, 64.5)
    said = "20-NN 60.00 % (95 % interval 55.00 to 64.50) of the starting weights, no training."
    assert headline(logged, 0, evaluated) == said


def test_tiles_are_of_the_epoch_that_was_kept_beside_the_start() -> None:
    lines = [{"epoch": 0, "20-nn": 64.0}, {"epoch": 1, "20-nn": 58.0}]
    start = {"epoch": 0, "20-nn": 60.0}
    tiles = [
        figure_tiles(LoggedMetrics(start, lines, kept), 2, votes=900)[0]
        for kept in ({}, {"epoch": 1, "20-nn": 64.0}, {"epoch": 0, "20-nn": 60.0})
    ]
    votes = "; votes: the true labels of all 900 training images, not those training had"
    assert [(tile.label, tile.value, tile.note.removesuffix(votes)) for tile in tiles] == [
        ("20-NN", "58.00 %", "after epoch 2; 60.00 % at the start"),
        ("20-NN", "64.00 %", "after epoch 1 of 2, which was kept; 60.00 % at the start"),
        ("20-NN", "60.00 %", "of the starting weights, which were kept; 58.00 % after epoch 2"),
    ]
    assert all(tile.note.endswith(votes) for tile in tiles)


def test_the_figure_of_a_run_is_that_of_the_epoch_it_kept(
    bars: Path, start: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, (20, 36, 32))
    run = adapt("xent", bars, start, tmp_path / "run", epochs=2, lr=0.02, evaluate_every=1)
    kept, cost = metrics(run, "kept")[0], run_cost(run.folder)
    assert (cost.reached["20-nn"].per_cent, cost.reached["20-nn"].epochs) == (kept["20-nn"], 2)


def test_the_report_begins_with_what_became_of_the_start(bars: Path, start: cmsf.Run, tmp_path: Path) -> None:
    run = adapt("msf", bars, start, tmp_path / "run", epochs=2, keep="last", evaluate_every=1)
    assert main(["report", str(run.path)]) == 0
    last, first = metrics(run, "epoch")[-1], metrics(run, "start")[0]
    answer = f"20-NN {first['20-nn']:.2f} → {last['20-nn']:.2f} %"
    assert answer in run.folder.report_file.read_text()
