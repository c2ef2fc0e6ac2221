"""Whole runs: what they leave behind, that they repeat, and that a stopped one goes on bit for bit."""

import json
import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from helpers import write_npz, write_photos
from runs import NEED_FEW_LABELS, TINY, StopAt, assert_same, assert_same_run, metrics, state
from safetensors.torch import load_file

import cmsf
from cmsf.data.transforms import Batch
from cmsf.method.learner import Learner
from cmsf.recipes import METHODS
from cmsf.training.schedule import Schedule
from cmsf.training.signals import Stopped


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="module")
def trained(bars: Path) -> Callable[[str], cmsf.Run]:
    """A run of a method, which several tests look at and none changes."""

    @cache
    def train(method: str) -> cmsf.Run:
        few = {"labels_per_class": 8} if method in NEED_FEW_LABELS else {}
        return cmsf.train(f"{method}-small", bars, bars.parent / method, quiet=True, **TINY, **few)

    return train


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_from_images_to_a_number(method: str, trained: Callable[[str], cmsf.Run]) -> None:
    run = trained(method)
    epochs = metrics(run, "epoch")
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert all(np.isfinite(line["loss"]) for line in metrics(run))
    assert 0 <= epochs[-1]["20-nn"] <= 100


@pytest.mark.usefixtures("all_rows")
def test_a_run_folder_holds_what_it_should(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("cmsf-self-small", bars, tmp_path / "run", quiet=True, seed=5, **TINY)
    names = {path.name for path in run.path.iterdir()}
    assert {"recipe.yaml", "environment.json", "metrics.jsonl", "data.parquet", "backbone.safetensors"} <= names
    assert {"checkpoints", "tensorboard", "neighbours.png"} <= names
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".part")]

    recipe = yaml.safe_load((run.path / "recipe.yaml").read_text())
    assert (recipe["bank_size"], recipe["size"], recipe["seed"]) == (144, 16, 5)
    environment = json.loads((run.path / "environment.json").read_text())
    assert {"torch", "seed", "machine", "commit", "threads"} <= set(environment)
    if (Path(__file__).parents[1] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", environment["commit"])
    listing = pq.read_table(run.path / "data.parquet").to_pylist()
    assert listing[0].keys() == {"path", "index", "label", "truth", "split"}
    assert len(listing) == 160
    assert list((run.path / "tensorboard").iterdir())

    steps, epochs = metrics(run, "step"), metrics(run, "epoch")
    wanted = {"loss", "loss_unconstrained", "loss_constrained", "purity_unconstrained", "purity_constrained"}
    wanted |= {"rank_mean", "rank_median", "spread", "lr", "images_per_second"}
    assert wanted <= set(steps[0])
    assert wanted <= set(epochs[0])
    assert len(epochs[0]["rank_histogram"]) == 100
    assert [line["step"] for line in steps] == [2, 4, 6, 8, 10, 12]
    for line in steps:
        assert line["loss"] == pytest.approx((line["loss_unconstrained"] + line["loss_constrained"]) / 2, abs=1e-5)


def test_in_the_first_epoch_nothing_is_constrained_and_afterwards_it_is(trained: Callable[[str], cmsf.Run]) -> None:
    first, *later = metrics(trained("cmsf-self"), "epoch")
    assert first["loss_constrained"] == first["loss_unconstrained"]
    assert first["rank_mean"] == 5
    assert all(line["loss_constrained"] != line["loss_unconstrained"] for line in later)


def test_the_same_seed_gives_the_same_run_and_another_another(bars: Path, tmp_path: Path) -> None:
    first, second, other = (
        cmsf.train("cmsf-self-small", bars, tmp_path / name, quiet=True, seed=seed, **TINY)
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert_same_run(first, second)
    assert metrics(first)[-1]["loss"] != metrics(other)[-1]["loss"]


@pytest.mark.parametrize("method", ["cmsf-self", "cmsf-sup"])
@pytest.mark.parametrize("stopped_at", [6, 8])  # in the middle and at the end of the second epoch
def test_a_stopped_run_resumes_bit_for_bit(
    method: str, stopped_at: int, bars: Path, trained: Callable[[str], cmsf.Run], tmp_path: Path
) -> None:
    arguments = (f"{method}-small", bars)
    with pytest.raises(Stopped, match="SIGTERM"):
        cmsf.train(*arguments, tmp_path / "parts", screen=StopAt(stopped_at, signal.SIGTERM), **TINY)
    unfinished = cmsf.Run(tmp_path / "parts")
    assert state(unfinished)["progress"]["step"] == stopped_at
    assert not unfinished.folder.backbone_file.exists()
    # What a run wrote after its last checkpoint is written again, not twice.
    with unfinished.folder.metrics_file.open("a") as file:
        file.write('{"kind": "step", "step": 999}\n')
    assert_same_run(trained(method), cmsf.train(*arguments, tmp_path / "parts", quiet=True, **TINY))


def test_a_run_follows_its_schedule_and_takes_every_epoch_in_another_order(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, list[int], float, float]] = []
    step = Learner.step

    def watched(learner: Learner, batch: Batch, momentum: float, support: Batch | None = None) -> Any:
        lr = learner.optimizer.param_groups[0]["lr"]
        seen.append((batch.epoch, batch.index.tolist(), lr, momentum))
        return step(learner, batch, momentum, support)

    monkeypatch.setattr(Learner, "step", watched)
    changes = TINY | {"target_momentum": 0.5, "target_momentum_end": 0.9, "warmup_epochs": 1}
    run = cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **changes)
    schedule = Schedule(run.recipe, steps_per_epoch=4)
    assert [lr for _, _, lr, _ in seen] == [schedule.lr(i) for i in range(12)]
    assert [momentum for *_, momentum in seen] == [schedule.target_momentum(i) for i in range(12)]
    orders = [[image for epoch, index, *_ in seen if epoch == number for image in index] for number in range(3)]
    assert all(len(set(order)) == len(order) == 128 for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_the_saved_network_is_the_online_one(trained: Callable[[str], cmsf.Run]) -> None:
    run = trained("msf")
    trained = state(run)["encoders"]
    for name, value in load_file(run.folder.backbone_file).items():
        assert torch.equal(value, trained[f"online.backbone.{name}"])
    assert not torch.equal(trained["online.backbone.stem.0.weight"], trained["target.backbone.stem.0.weight"])


@pytest.mark.parametrize("method", ["byol", "msf", "cmsf-self"])
def test_the_truth_cannot_reach_a_loss_that_is_not_told_it(
    method: str, bars: Path, trained: Callable[[str], cmsf.Run], tmp_path: Path
) -> None:
    arrays = dict(np.load(bars))
    shuffled = tmp_path / "bars.npz"
    np.savez(shuffled, **(arrays | {"y": np.random.default_rng(0).permutation(arrays["y"])}))
    true = trained(method)
    false = cmsf.train(f"{method}-small", shuffled, tmp_path / "false", quiet=True, **TINY)
    assert_same(load_file(true.folder.backbone_file), load_file(false.folder.backbone_file))
    assert true.evaluate("knn") != false.evaluate("knn")


def test_the_number_in_training_is_the_number_afterwards(trained: Callable[[str], cmsf.Run]) -> None:
    run = trained("cmsf-self")
    shown = metrics(run, "epoch")[-1]
    accuracy = cmsf.Run(run.path).evaluate("knn")
    assert accuracy == {name: shown[name] for name in accuracy}
    saved = json.loads((run.path / "results" / "knn.json").read_text())
    assert saved["figures"] == accuracy
    assert saved["protocol"]["votes"]["20-nn weighted"]["temperature"] == 0.07


def test_the_default_folder_is_named_after_the_recipe_or_its_file(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cmsf.train("msf", bars, quiet=True, **TINY).path == Path("runs/msf-small")
    Path("mine.yaml").write_text("name: msf-small\nbackbone: small-residual\n")
    assert cmsf.train("mine.yaml", bars, quiet=True, **TINY).path == Path("runs/mine")


def test_a_loaded_backbone_is_a_plain_module_in_eval_mode(trained: Callable[[str], cmsf.Run]) -> None:
    backbone = cmsf.load(trained("msf").path)
    assert not backbone.training
    assert backbone(torch.zeros(2, 3, 16, 16)).shape == (2, 128)


def test_labels_make_what_is_learned_better_than_what_was_there(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("cmsf-sup-small", bars, tmp_path / "run", quiet=True, **(TINY | {"epochs": 12, "lr": 0.1}))
    trained, untrained = run.evaluate("knn")["20-nn"], run.references()["untrained encoder"]["20-nn"]
    assert trained >= untrained
    assert trained > 80


@pytest.mark.usefixtures("all_rows")
def test_a_folder_of_eighty_photos_just_works(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=20, classes=4)
    run = cmsf.train("cmsf-self", photos, tmp_path / "run", quiet=True, epochs=1, size=32)
    assert run.recipe.name == "cmsf-self-standard"
    assert (run.recipe.bank_size, run.recipe.batch_size) == (72, 16)
    assert run.evaluate("knn")["1-nn"] >= 0


@pytest.mark.usefixtures("all_rows")
def test_unlabelled_images_are_learned_from_and_not_judged(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "bars.npz", labelled=False)
    run = cmsf.train("cmsf-self-small", data, tmp_path / "run", quiet=True, **TINY)
    last = metrics(run, "epoch")[-1]
    assert "20-nn" not in last
    assert last["purity_constrained"] is None
    assert run.folder.neighbours_picture.exists()


def test_partly_labelled_images_have_a_purity_over_those_that_are(tmp_path: Path) -> None:
    arrays = dict(np.load(write_npz(tmp_path / "bars.npz")))
    arrays["y"][20:] = -1
    np.savez(tmp_path / "some.npz", **arrays)
    run = cmsf.train("cmsf-sup-small", tmp_path / "some.npz", tmp_path / "run", quiet=True, **TINY)
    assert all(0 <= line["purity_constrained"] <= 1 for line in metrics(run, "epoch"))


def test_images_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=15, classes=3, side=24)
    changes = {"epochs": 2, "log_every": 1}
    with pytest.raises(Stopped):
        cmsf.train("msf", photos, tmp_path / "stopped", screen=StopAt(2, signal.SIGINT), **changes)
    run = cmsf.train("msf", photos, tmp_path / "run", quiet=True, **changes)
    (photos / "class 0" / "new.jpg").write_bytes(next(photos.rglob("*.jpg")).read_bytes())
    with pytest.raises(cmsf.BadInput, match=r"have changed since \(45 then, 46 now"):
        run.evaluate("knn")
    (photos / "class 0" / "new.jpg").replace(photos / "class 1" / "new.jpg")
    next((photos / "class 1").glob("0*.jpg")).unlink()
    with pytest.raises(cmsf.BadInput, match=r"have changed since \(45 then, 45 now"):
        cmsf.train("msf", photos, tmp_path / "stopped", quiet=True, **changes)


def test_two_processes_do_not_train_the_same_run(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        cmsf.train("msf-small", bars, tmp_path / "run", screen=StopAt(2, signal.SIGINT), **TINY)
    folder = cmsf.Run(tmp_path / "run").folder
    with folder.locked(), pytest.raises(cmsf.BadInput, match=f"is being trained by process {os.getpid()}"):
        cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **TINY)
    cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **TINY)


def test_a_resume_with_other_threads_says_what_that_means(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        cmsf.train("msf-small", bars, tmp_path / "run", screen=StopAt(2, signal.SIGINT), **TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        cmsf.train("msf-small", bars, tmp_path / "run", **TINY)
    finally:
        torch.set_num_threads(threads)
    assert f"threads was {threads} and is {threads + 1}: the run will not equal" in capsys.readouterr().err


def test_a_folder_that_cannot_be_laid_down_is_not_half_there(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(cmsf.BadInput, match="No space left on device"):
        cmsf.train("msf-small", bars, tmp_path / "runs" / "run", quiet=True, **TINY)
    assert not list((tmp_path / "runs").iterdir())


def test_a_finished_run_is_left_as_it_is(bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **TINY)

    def dates() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.path.rglob("[!.]*") if path.is_file()}

    before = dates()
    cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **TINY)
    assert dates() == before
