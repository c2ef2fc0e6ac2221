"""Checkpoints: what is in them, what becomes of damaged ones, and that training does not wait for them."""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import write_npz
from runs import TINY, StopAt, assert_same, assert_same_run, metrics, replace_part, rewrite, state
from torch import Tensor

import cmsf
from cmsf.data.transforms import WholeBatch
from cmsf.method.build import make_learner
from cmsf.method.learner import Learner
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs import checkpoint
from cmsf.runs.checkpoint import Checkpoint
from cmsf.training.checkpointer import Checkpointer
from cmsf.training.options import TrainingOptions
from cmsf.training.signals import Stopped
from cmsf.utils.files import FullDisk, HashedFile, file_sha256


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="module")
def whole(bars: Path) -> cmsf.Run:
    return cmsf.train("cmsf-self-small", bars, bars.parent / "whole", quiet=True, checkpoint_minutes=0, **TINY)


@pytest.fixture(scope="module")
def half(bars: Path) -> cmsf.Run:
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, bars.parent / "half", screen=StopAt(6, signal.SIGTERM), **TINY)
    return cmsf.Run(bars.parent / "half")


@pytest.fixture
def stopped(half: cmsf.Run, tmp_path: Path) -> cmsf.Run:
    """A run with a whole checkpoint of step 4 and one in mid-epoch of step 6, to do with as one likes."""
    return cmsf.Run(shutil.copytree(half.path, tmp_path / "run"))


def checkpointer_of(run: cmsf.Run, say: Callable[[str], None]) -> Checkpointer:
    """Beside a new learner of the run's recipe."""
    learner = make_learner(run.recipe, torch.zeros(144, dtype=torch.int64), "cpu")
    return Checkpointer(run.folder.checkpoints, run.recipe, learner, say)


def files(run: cmsf.Run) -> set[str]:
    return {path.name for path in run.folder.checkpoints.iterdir()}


def resolved(method: str, **changes: Any) -> ResolvedRecipe:
    numbers = {"bank_size": 24, "batch_size": 8, "size": 16, "projection_hidden": 16, "projection_dim": 8}
    numbers |= {"prediction_hidden": 16, "support_classes": 0, "support_images": 0, "weak_crop": 0.2, "cache": "ram"}
    numbers |= {"strong_crop": 0.2, "extra_size": 8, "warmup_epochs": 0}
    return ResolvedRecipe(**({"name": method, "backbone": "small-residual"} | numbers | changes))


def learner(**changes: Any) -> Learner:
    return make_learner(
        resolved("test", **changes), torch.arange(24) % 3 - (torch.arange(24) > 11).long() * 5 % 4, "cpu"
    )


def batch(step: int) -> WholeBatch:
    generator = torch.Generator().manual_seed(step)
    index = torch.randperm(24, generator=generator)[:8]
    return WholeBatch(index, 0, step, torch.randint(256, (8, 3, 16, 16), generator=generator, dtype=torch.uint8))


def take_steps(made: Learner, steps: range) -> None:
    for step in steps:
        if step % 3 == 0:
            made.supervision.refresh(lambda index: torch.ones(len(index), 8))
        made.step(batch(step), 0.9)


KINDS = {
    "companions": {"constraint": "companion", "unconstrained_weight": 0.5},
    "half the bits": {"constraint": "companion", "precision": "fp16"},
    "lars, in double": {"optimiser": "lars", "precision": "fp64"},
    **{f"pseudo-labels by {kind}": {"constraint": "label", "pseudo_labels": kind} for kind in ("mlp-3", "knn")},
    "a classifier without momentum": {"objective": "cross-entropy", "bank_size": 0, "sgd_momentum": 0.0},
}


def test_a_save_that_finds_no_room_is_tried_again_when_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("cmsf.training.checkpointer.time.monotonic", lambda: now[0])
    options = TrainingOptions(checkpoint_minutes=1)
    checkpointer = Checkpointer(tmp_path / "checkpoints", resolved("test"), learner(), pytest.fail, options)

    def no_room() -> dict[str, Any]:
        raise FullDisk("no room for the log")

    now[0] = 61.0
    assert checkpointer.is_due()
    with checkpointer, pytest.raises(FullDisk):
        checkpointer.save(1, no_room, full_cache=True)
    assert not checkpointer.is_due()
    now[0] = 122.0
    assert checkpointer.is_due()


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_is_put_back_takes_the_same_steps(kind: str, tmp_path: Path) -> None:
    changes = KINDS[kind]
    whole, first, second = (learner(**changes) for _ in range(3))
    take_steps(whole, range(7))
    take_steps(first, range(4))
    checkpointer = Checkpointer(tmp_path / "checkpoints", resolved("test", **changes), first, pytest.fail)
    with checkpointer:
        checkpointer.save(4, lambda: {"step": 4}, full_cache=True)
        take_steps(first, range(4, 5))  # which the checkpoint in the making must not see
        checkpointer.save(5, lambda: {"step": 5}, full_cache=False)
        take_steps(first, range(5, 7))
    again = Checkpointer(tmp_path / "checkpoints", resolved("test", **changes), second, pytest.fail)
    taken: list[dict[str, Any]] = []
    assert again.load_latest(taken.append)
    assert taken == [{"step": 5}]
    take_steps(second, range(5, 7))
    for other in (first, second):
        for name in ("encoders", "optimizer", "bank", "scaler", "supervision"):
            assert_same(getattr(whole, name).state_dict(), getattr(other, name).state_dict())
        if whole.supervision.companion_cache is not None:
            assert_same(whole.supervision.companion_cache.embedding, other.supervision.companion_cache.embedding)


def test_the_manifest_names_its_parts_and_the_cache_is_whole_at_the_ends_of_epochs_alone(stopped: cmsf.Run) -> None:
    assert files(stopped) == {
        *("step-00000004.json", "step-00000004-state.pt", "step-00000004-cache.pt"),
        *("step-00000006.json", "step-00000006-state.pt", "step-00000006-changed.pt"),
    }
    about = json.loads((stopped.folder.checkpoints / "step-00000006.json").read_text())
    assert about["step"] == 6
    assert about["recipe"]["batch_size"] == 32
    assert about["parts"]["cache"]["file"] == "step-00000004-cache.pt"
    for part in about["parts"].values():
        file = stopped.folder.checkpoints / part["file"]
        assert (part["size"], part["sha256"]) == (file.stat().st_size, file_sha256(file))
    changed = Checkpoint.read(stopped.folder.checkpoints / "step-00000006.json").load()["changed"]
    assert len(changed["index"]) == 64  # two batches


def test_three_checkpoints_are_kept_and_nothing_that_they_do_not_name(bars: Path, tmp_path: Path) -> None:
    changes = TINY | {"epochs": 4, "batch_size": 72}
    run = cmsf.train("cmsf-self-small", bars, tmp_path / "run", quiet=True, **changes)
    assert sorted(files(run)) == [
        f"step-{step:08d}{kind}" for step in (4, 6, 8) for kind in ("-cache.pt", "-state.pt", ".json")
    ]


def test_time_makes_checkpoints_in_the_middle_of_an_epoch(whole: cmsf.Run, bars: Path, tmp_path: Path) -> None:
    run = cmsf.train("cmsf-self-small", bars, tmp_path / "run", quiet=True, checkpoint_minutes=1e-6, **TINY)
    assert {"step-00000010.json", "step-00000011.json", "step-00000012.json"} <= files(run)
    assert "step-00000008-cache.pt" in files(run)  # the last whole one before them
    assert_same_run(run, whole)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def say(old: str, new: str) -> Any:
    def damage(path: Path) -> None:
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    return damage


def say_with_its_hash(path: Path) -> None:
    about = json.loads(path.read_text())
    about["recipe"]["precision"] = "fq32"
    rewrite(path, about)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        ("step-00000006-state.pt", truncate, "its step-00000006-state.pt has .* bytes instead of"),
        ("step-00000006-state.pt", flip, "its step-00000006-state.pt is not what was written"),
        ("step-00000006-changed.pt", Path.unlink, "its step-00000006-changed.pt is missing"),
        ("step-00000006.json", say('"k": 5', '"k": 4'), "its manifest is not what was written"),
        ("step-00000006.json", say('"fp32"', '"fq32"'), "its manifest is not what was written"),
        ("step-00000006.json", say_with_its_hash, "its recipe: .*fq32"),
        *(("step-00000006.json", damage, "it is not the manifest") for damage in (pipe, endless)),
        *(("step-00000006-state.pt", damage, "its .*state.pt cannot be read") for damage in (pipe, endless)),
        ("step-00000006.json", truncate, "it is not the manifest"),
        ("step-00000006.json", lambda path: path.write_text("[]"), "it is not the manifest"),
        ("step-00000006.json", lambda path: path.write_bytes(b"\xff\xfe"), "it is not the manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    part: str, damage: Any, message: str, stopped: cmsf.Run
) -> None:
    damage(stopped.folder.checkpoints / part)
    said: list[str] = []
    checkpointer = checkpointer_of(stopped, said.append)
    taken: list[dict[str, Any]] = []
    assert checkpointer.load_latest(taken.append)
    assert [progress["step"] for progress in taken] == [checkpointer.saved_step] == [4]
    assert re.search(f"checkpoint step-00000006.json cannot be used: {message}", said[0])


@pytest.mark.parametrize("inside_its_hashes", [False, True])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_to_the_same_end(
    stopped: cmsf.Run, whole: cmsf.Run, bars: Path, capsys: pytest.CaptureFixture[str], inside_its_hashes: bool
) -> None:
    manifest = stopped.folder.checkpoints / "step-00000006.json"
    if inside_its_hashes:
        state = Checkpoint.read(manifest).load()["state"]
        state["progress"]["totals"]["ranks"] = "many"
        replace_part(manifest, "state", state)
    else:
        flip(stopped.folder.checkpoints / "step-00000006-state.pt")
    run = cmsf.train("cmsf-self-small", bars, stopped.path, **TINY)
    assert "resuming from step 4 of 12" in " ".join(capsys.readouterr().err.split())
    assert_same_run(whole, run)
    assert not {name for name in files(run) if "step-00000006" in name}  # it did not work out


def test_a_log_that_is_shorter_than_its_checkpoint_says_is_told_and_goes_on_with_a_whole_line(
    stopped: cmsf.Run, bars: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = metrics(stopped)
    truncate(stopped.folder.metrics_file)
    run = cmsf.train("cmsf-self-small", bars, stopped.path, **TINY)
    said = " ".join(capsys.readouterr().err.split())
    assert "100 bytes shorter than at the checkpoint; these lines are lost" in said
    assert metrics(run)[: len(before) - 1] == before[:-1]
    assert [line["step"] for line in metrics(run, "step")] == [2, 4, 8, 10, 12]


def test_where_no_checkpoint_is_good_all_are_named_with_the_remedy(stopped: cmsf.Run, bars: Path) -> None:
    for path in stopped.folder.checkpoints.glob("*.pt"):
        truncate(path)
    with pytest.raises(
        cmsf.BadInput, match=r"step-00000006.json: .*likewise 1 before it.* remove that folder to begin"
    ):
        cmsf.train("cmsf-self-small", bars, stopped.path, quiet=True, **TINY)


def test_a_checkpoint_of_another_recipe_is_refused_with_the_differences(stopped: cmsf.Run, bars: Path) -> None:
    manifest = stopped.folder.checkpoints / "step-00000006.json"
    about = json.loads(manifest.read_text())
    about["recipe"] |= {"lr": 0.5, "k": 7}
    rewrite(manifest, about)
    with pytest.raises(cmsf.BadInput, match=r"has another recipe than its run \(k: 5 against 7; lr: 0.2 against 0.5\)"):
        cmsf.train("cmsf-self-small", bars, stopped.path, quiet=True, **TINY)


def hostile(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """States that have the right hash, and what is wrong with them."""
    weight = "online.backbone.stem.0.weight"
    return {
        "a list": {"everything": [1, 2]},
        "weights of another type": {"encoders": found["encoders"] | {weight: found["encoders"][weight].double()}},
        "a word for weights": {"encoders": found["encoders"] | {weight: "heavy"}},
        "a bank beyond its end": {"bank": found["bank"] | {"_extra_state": {"next": 10**9, "written": 10**9}}},
        "a bank of words": {"bank": found["bank"] | {"_extra_state": {"next": "a", "written": "b"}}},
        "momentum of another shape": {
            "optimiser": {number: {"momentum_buffer": torch.zeros(3)} for number in found["optimiser"]}
        },
        "momentum of nothing": {"optimiser": {99999: {"momentum_buffer": torch.zeros(3)}}},
        "an optimiser of words": {"optimiser": "sgd"},
        "knowledge of something else": {"knowledge": {"embedding": torch.zeros(2, 2)}},
        "a scale": {"scaler": {"scale": 1.0}},
        "no progress": {"progress": None},
        "progress without a step": {"progress": {}},
        "another step": {"progress": found["progress"] | {"step": 5}},
        "totals of words": {"progress": found["progress"] | {"totals": "many"}},
        "totals of lists of words": {
            "progress": found["progress"] | {"totals": found["progress"]["totals"] | {"spreads": ["wide"]}}
        },
        "a log of length minus one": {"progress": found["progress"] | {"metrics_length": -1}},
        "a watch of words": {"progress": found["progress"] | {"watch": {"below": "low", "said": 1}}},
    }


OF_TRAINING = ("totals of words", "totals of lists of words", "a log of length minus one", "a watch of words")
"""What is wrong beside the learner."""


def test_a_hostile_checkpoint_is_bad_input_and_nothing_worse(stopped: cmsf.Run, bars: Path) -> None:
    folder = stopped.folder.checkpoints
    (folder / "step-00000004.json").unlink()
    manifest = folder / "step-00000006.json"
    good = Checkpoint.read(manifest).load()
    cases: list[tuple[str, str, Any]] = [
        (name, "state", change["everything"] if "everything" in change else good["state"] | change)
        for name, change in hostile(good["state"]).items()
    ]
    rows = good["changed"]
    cases += [
        ("a cache of one row", "cache", {"embedding": good["cache"]["embedding"][:1]}),
        ("a cache of nothing", "cache", {}),
        ("rows beyond the cache", "changed", rows | {"index": rows["index"] + 10**6}),
        ("rows by fractions", "changed", rows | {"index": rows["index"].double()}),
        ("too few rows", "changed", rows | {"embedding": rows["embedding"][:3]}),
    ]
    checkpointer = checkpointer_of(stopped, lambda _: None)

    def go_on(name: str) -> None:
        if checkpointer.load_latest(lambda _: None) and name in OF_TRAINING:
            cmsf.train("cmsf-self-small", bars, stopped.path, quiet=True, **TINY)

    for name, part, content in cases:
        replace_part(manifest, part, content)
        with pytest.raises(cmsf.BadInput, match="can be used"):
            go_on(name)
        replace_part(manifest, part, good[part])
    about = json.loads(manifest.read_text())
    about["parts"]["state"]["file"] = "../../elsewhere.pt"
    rewrite(manifest, about)
    with pytest.raises(cmsf.BadInput, match="it is not the manifest"):
        cmsf.train("cmsf-self-small", bars, stopped.path, quiet=True, **TINY)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write, steps = threading.Event(), checkpoint.save, []

    def slow(*given: Any) -> Checkpoint:
        assert threading.current_thread() is not threading.main_thread()
        go.wait(60)
        return write(*given)

    class Watch(StopAt):
        def step(self, step: int, line: Any) -> None:
            steps.append((step, go.is_set()))
            if step == 8:  # the next checkpoint is due after this step
                go.set()

    monkeypatch.setattr(checkpoint, "save", slow)
    run = cmsf.train("msf-small", bars, tmp_path / "run", screen=Watch(0, 0), **TINY)
    assert [step for step, written in steps if not written] == [2, 4, 6, 8]
    assert "step-00000008.json" in files(run)


def test_what_fails_in_the_thread_is_told_in_the_next_step(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise cmsf.BadInput("the moon is in the wrong phase")

    monkeypatch.setattr(checkpoint, "_save_part", broken)
    with pytest.raises(cmsf.BadInput, match="wrong phase"):
        cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **TINY)
    assert metrics(cmsf.Run(tmp_path / "run"), "step")[-1]["step"] < 12


def test_a_file_that_fails_says_so_when_it_is_finished_and_not_to_its_writer(tmp_path: Path) -> None:
    file = HashedFile(tmp_path / "file")
    assert file.write(b"some") == 4
    assert file.finish() == file_sha256(tmp_path / "file")
    full = HashedFile(Path("/dev/full"))
    torch.save({"weights": torch.zeros(1000)}, full)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        full.finish()


def test_what_is_saved_is_not_shared_with_what_is_trained(stopped: cmsf.Run) -> None:
    kept = state(stopped)
    assert all(isinstance(value, Tensor) and not value.requires_grad for value in kept["encoders"].values())
