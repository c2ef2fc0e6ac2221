"""Faults that really happen: processes killed, disks full, images gone, numbers that are none. Nothing lost, nothing
different."""

import errno
import fcntl
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import write_npz, write_photos
from processes import PATIENCE, await_half_written, await_step, start
from runs import TINY, StopAt, assert_same_run, metrics, scalars, state

import cmsf
from cmsf import api
from cmsf.data import loader
from cmsf.data.loader import _BatchDataset
from cmsf.method.learner import Learner
from cmsf.runs import checkpoint
from cmsf.runs.folder import RunFolder
from cmsf.training.signals import Stopped
from cmsf.utils.screen import Screen

pytestmark = pytest.mark.usefixtures("one_thread")

KILLED = {"epochs": 6, "batch_size": 16, "log_every": 2, "projection_hidden": 32, "projection_dim": 16}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), per_class=20, classes=3, side=40)


@pytest.fixture(scope="module")
def whole_of_six(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    return cmsf.train("cmsf-self-small", bars, tmp_path_factory.mktemp("six") / "run", quiet=True, **KILLED)


def test_a_run_that_is_killed_at_any_moment_equals_one_that_is_not(
    bars: Path, whole_of_six: cmsf.Run, tmp_path: Path
) -> None:
    out, chance = tmp_path / "killed", random.Random(5)
    given = ("cmsf-self-small", "--data", bars, "--checkpoint-minutes", "0.002")
    resumed = ("--resume", out, "--checkpoint-minutes", "0.002")
    for kill in range(3):
        process = start(out, *(resumed if kill else given), **({} if kill else KILLED))
        if kill == 1:
            half_written = await_half_written(process, out)
        else:
            await_step(process, out, chance.randrange(5 + 15 * kill, 15 + 15 * kill))
            time.sleep(chance.random() / 20)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        if kill == 1:
            assert all(part.exists() for part in half_written)
    process = start(out, *resumed)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, said
    assert "resuming from step" in said
    killed = cmsf.Run(out)
    assert_same_run(whole_of_six, killed)
    steps = [line["step"] for line in metrics(killed, "step")]
    assert steps == sorted(set(steps))
    assert scalars(killed) == scalars(whole_of_six)
    assert not list(out.rglob("*.part"))


def test_a_signal_in_mid_epoch_beside_workers_and_a_save_stops_at_once_and_loses_nothing(
    photos: Path, tmp_path: Path
) -> None:
    settings = {"epochs": 4, "batch_size": 4, "log_every": 1, "size": 16, "cache": "off", "evaluate_every": 0}
    settings |= {"projection_hidden": 32, "projection_dim": 16}
    whole = cmsf.train("cmsf-self-small", photos, tmp_path / "whole", quiet=True, workers=0, **settings)
    out, machine = tmp_path / "run", ("--workers", "2", "--checkpoint-minutes", "0.002")
    process = start(out, "cmsf-self-small", "--data", photos, *machine, **settings)
    await_step(process, out, 17)  # of 13 an epoch
    for number, code, last in ((signal.SIGTERM, 143, 17), (signal.SIGINT, 130, 30)):
        await_half_written(process, out)
        asked = time.monotonic()
        os.killpg(process.pid, number)
        os.killpg(process.pid, signal.SIGCONT)
        said = process.communicate(timeout=PATIENCE)[1]
        assert time.monotonic() - asked < 10
        assert process.returncode == code, said
        assert "after a checkpoint; the same command resumes" in said
        assert "Traceback" not in said
        assert last <= state(cmsf.Run(out))["progress"]["step"] == metrics(cmsf.Run(out))[-1]["step"]
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no worker is left
        process = start(out, "--resume", out, *machine)
        await_step(process, out, 30)
    assert process.wait(PATIENCE) == 0
    assert_same_run(whole, cmsf.Run(out))


def test_a_run_that_was_killed_beside_its_workers_is_resumed_at_once(photos: Path, tmp_path: Path) -> None:
    settings = {"epochs": 40, "batch_size": 4, "log_every": 1, "size": 16, "cache": "off", "evaluate_every": 0}
    settings |= {"projection_hidden": 32, "projection_dim": 16}
    out, machine = tmp_path / "run", ("--workers", "2", "--checkpoint-minutes", "0.002")
    process = start(out, "cmsf-self-small", "--data", photos, *machine, **settings)
    await_step(process, out, 17)
    process.kill()
    process.wait()
    killed = time.monotonic()
    with RunFolder(out).locked():  # no worker holds it any more; torch's own would for five seconds
        assert time.monotonic() - killed < 3
    process = start(out, "--resume", out, *machine)
    reached = metrics(cmsf.Run(out))[-1]["step"]
    await_step(process, out, reached + 3)
    process.terminate()
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143, said
    assert "resuming from step" in said


def test_the_lock_of_one_that_is_gone_is_waited_for_and_that_of_one_that_is_not_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cmsf.utils.locks._LOCK_SECONDS", 2.0)
    gone = subprocess.Popen(["true"])
    gone.wait()
    folder, file = RunFolder(tmp_path), (tmp_path / ".lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    for holder, wait in ((os.getpid(), 0.0), (gone.pid, 2.0)):
        (tmp_path / ".lock").write_text(str(holder))
        begun = time.monotonic()
        with pytest.raises(cmsf.BadInput, match=f"being trained by process {holder}"), folder.locked():
            pass
        assert wait <= time.monotonic() - begun < wait + 1.5
    threading.Timer(0.3, file.close).start()
    with folder.locked():
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_is_really_full_stops_a_run_which_goes_on_when_there_is_room(
    bars: Path, whole: cmsf.Run, small_disk: Path
) -> None:
    out, filler = small_disk / "run", small_disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    with pytest.raises(cmsf.BadInput, match=r"No space left on device \(.*0 B free\); make room.* from step \d"):
        cmsf.train("cmsf-self-small", bars, out, screen=At(step_6=fill), **TINY)
    assert not list(out.rglob("*.part"))
    filler.unlink()
    assert_same_run(whole, cmsf.resume(out, quiet=True))


@pytest.fixture
def file_size() -> Iterator[Any]:
    """How large a file this process may write, as on a disk that is full; None: as large as it likes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[0] if size is None else size, limits[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class At(Screen):
    """Does something at some steps, and keeps what was said."""

    def __init__(self, **actions: Any) -> None:
        super().__init__(quiet=True)
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}
        self.said: list[str] = []

    def step(self, step: int, line: Any) -> None:
        if step in self.actions:
            self.actions.pop(step)()

    def print(self, text: str) -> None:
        self.said.append(text)


SMALL_FILES = 100_000
"""Enough for a log, and not for a checkpoint."""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(bars: Path) -> cmsf.Run:
    return cmsf.train("cmsf-self-small", bars, bars.parent / "whole", quiet=True, **TINY)


def test_a_full_disk_stops_a_process_with_the_numbers_and_its_last_checkpoint(
    bars: Path, whole: cmsf.Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, out, screen=StopAt(6, signal.SIGTERM), **TINY)
    before = content(out / "checkpoints")
    process = start(out, "--resume", out, limit=SMALL_FILES)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("cmsf: ")]
    for words in ("File too large", "needed", "free)", "raise ulimit -f", "resumes from step 6"):
        assert words in line
    assert "Traceback" not in said
    assert content(out / "checkpoints") == before
    assert_same_run(whole, cmsf.resume(out, quiet=True))


def test_a_run_may_go_on_without_room_and_saves_again_when_there_is_some(
    bars: Path, whole: cmsf.Run, tmp_path: Path, file_size: Any
) -> None:
    screen = At(step_6=lambda: file_size(SMALL_FILES), step_10=lambda: file_size(None))
    run = cmsf.train("cmsf-self-small", bars, tmp_path / "run", screen=screen, on_full_disk="go-on", **TINY)
    assert any("File too large" in text and "resumes from step 4" in text for text in screen.said)
    assert_same_run(whole, run)
    assert not list(run.path.rglob("*.part"))


def test_lines_that_find_no_room_are_kept_and_written_later_without_a_gap(
    bars: Path, whole: cmsf.Run, tmp_path: Path, file_size: Any
) -> None:
    out, halves = tmp_path / "run", []

    def almost_full() -> None:
        file_size((out / "metrics.jsonl").stat().st_size + 100)  # half a line

    def look() -> None:
        halves.append((out / "metrics.jsonl").read_bytes())
        file_size(None)

    screen = At(step_6=almost_full, step_10=look)
    settings = TINY | {"checkpoint_every": 3}
    run = cmsf.train("cmsf-self-small", bars, out, screen=screen, on_full_disk="go-on", **settings)
    assert sum("its lines are kept in memory" in text for text in screen.said) == 1
    assert any("no more events for TensorBoard" in text for text in screen.said)
    assert halves[0].endswith(b"}\n")
    assert json.loads(halves[0].splitlines()[-1])["step"] == 6
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]


def test_a_full_disk_at_a_signal_is_said_and_the_older_checkpoint_goes_on(
    bars: Path, whole: cmsf.Run, tmp_path: Path, file_size: Any
) -> None:
    def full_and_stopped() -> None:
        file_size(SMALL_FILES)
        os.kill(os.getpid(), signal.SIGTERM)

    screen = At(step_6=full_and_stopped)
    with pytest.raises(Stopped) as stopped:
        cmsf.train("cmsf-self-small", bars, tmp_path / "run", screen=screen, **TINY)
    assert not stopped.value.saved
    assert any("step-00000006-state.pt: File too large" in text for text in screen.said)
    file_size(None)
    assert_same_run(whole, cmsf.resume(tmp_path / "run", quiet=True))


def test_a_full_disk_at_the_end_leaves_a_run_that_the_same_command_finishes(
    bars: Path, whole: cmsf.Run, tmp_path: Path, file_size: Any
) -> None:
    screen = At(step_12=lambda: file_size(SMALL_FILES))
    with pytest.raises(cmsf.BadInput, match=r"backbone.safetensors: File too large .* resumes from step 8"):
        cmsf.train("cmsf-self-small", bars, tmp_path / "run", screen=screen, on_full_disk="go-on", **TINY)
    assert not list((tmp_path / "run").rglob("*.part"))
    file_size(None)
    assert_same_run(whole, cmsf.resume(tmp_path / "run", quiet=True))


FROM_DISK = TINY | {"size": 16, "batch_size": 16, "epochs": 2, "cache": "off", "log_every": 1, "evaluate_every": 0}


def test_an_image_that_vanishes_stops_the_run_by_its_name_until_it_is_back(photos: Path, tmp_path: Path) -> None:
    whole = cmsf.train("cmsf-self-small", photos, tmp_path / "whole", quiet=True, workers=0, **FROM_DISK)
    last = whole.data().train.order(0, 1)[-10:].tolist()  # of the second epoch, in its third batch or left over
    gone = [photos / whole.data().train.paths[i] for i in last]
    kept = {path: path.read_bytes() for path in gone}
    screen = At(step_3=lambda: [path.unlink() for path in gone])
    with pytest.raises(cmsf.BadInput, match=r"cannot read 1 image \(class .*jpg: no such file\).*from step 5"):
        cmsf.train("cmsf-self-small", photos, tmp_path / "run", screen=screen, workers=0, **FROM_DISK)
    missing = r"images of .*run have changed since \(60 then, 50 now, .*\); restore them, or start another run"
    with pytest.raises(cmsf.BadInput, match=missing):
        cmsf.resume(tmp_path / "run", quiet=True, workers=0)
    with pytest.raises(cmsf.BadInput, match=missing):
        cmsf.train("cmsf-self-small", photos, tmp_path / "run", quiet=True, workers=0, **FROM_DISK)
    for path, pixels in kept.items():
        path.write_bytes(pixels)
    assert_same_run(whole, cmsf.resume(tmp_path / "run", quiet=True, workers=0))


@pytest.fixture(scope="module")
def half(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, out, screen=StopAt(20, signal.SIGTERM), **KILLED)
    return out


@pytest.fixture
def stopped(half: Path, tmp_path: Path) -> Path:
    return shutil.copytree(half, tmp_path / "run")


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, before = os.listdir, everything_in(stopped)

    def refusing(folder: Any = ".") -> list[str]:
        if Path(folder).name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(cmsf.BadInput, match=r"cannot read .*checkpoints: Permission denied; make it readable"):
        cmsf.resume(stopped, quiet=True)
    assert everything_in(stopped) == before


@pytest.mark.parametrize(
    ("mode", "message"), [(os.R_OK, "cannot be read; make it readable"), (os.W_OK, "nothing can be written to")]
)
def test_a_folder_that_is_closed_is_said_before_anything_is_trained(
    mode: int, message: str, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, asked = everything_in(stopped), os.access
    monkeypatch.setattr(os, "access", lambda path, how: not (path == stopped and how & mode) and asked(path, how))
    with pytest.raises(cmsf.BadInput, match=message):
        cmsf.resume(stopped, quiet=True)
    assert everything_in(stopped) == before


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(
    bars: Path, stopped: Path, whole_of_six: cmsf.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    run = cmsf.resume(stopped)
    assert "there is no checkpoint, so training begins again at step 0" in capsys.readouterr().err
    assert_same_run(whole_of_six, run)


def test_a_resumed_run_holds_its_bank_as_before(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    make = api.make_learner
    monkeypatch.setattr(api, "make_learner", lambda *given: held.append(given[-1]) or make(*given))
    for number, sharded in enumerate((True, False)):
        out = tmp_path / str(number)
        screen = StopAt(6, signal.SIGTERM)
        with pytest.raises(Stopped):
            cmsf.train("cmsf-self-small", bars, out, screen=screen, bank_sharded=sharded, **TINY)
        cmsf.resume(out, quiet=True)
    assert held == [True, True, False, False]


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_is_killed_is_replaced_and_the_result_is_the_same(photos: Path, tmp_path: Path) -> None:
    # Two workers are asked for at most six batches ahead: of fifteen to come, each has one that only it would read.
    settings = FROM_DISK | {"batch_size": 4}
    whole = cmsf.train("cmsf-self-small", photos, tmp_path / "whole", quiet=True, workers=0, **settings)

    def kill_one() -> None:
        workers = [child for child in multiprocessing.active_children() if child.daemon]
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)

    screen = At(step_1=kill_one, step_15=kill_one)
    run = cmsf.train("cmsf-self-small", photos, tmp_path / "run", screen=screen, workers=2, **settings)
    died = "a process that decodes images died (SIGKILL, as where memory runs out); new ones read on from where it was"
    assert screen.said.count(died) == 2
    assert not any("died" in text for text in screen.said if text != died)
    assert_same_run(whole, run)


@pytest.mark.usefixtures("impatient")
def test_workers_that_keep_dying_end_the_run_with_a_checkpoint(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = _BatchDataset.__getitem__

    def dies(self: _BatchDataset, entry: Any) -> Any:
        if entry[0] == 1:  # in the second epoch
            os.kill(os.getpid(), signal.SIGKILL)
        return cut(self, entry)

    monkeypatch.setattr(loader._BatchDataset, "__getitem__", dies)
    screen = At()
    with pytest.raises(cmsf.BadInput, match=r"3 times in a row, .*--workers than 1, .* resumes from step [23]"):
        cmsf.train("cmsf-self-small", photos, tmp_path / "run", screen=screen, workers=1, **FROM_DISK)
    assert sum("new ones read on" in text for text in screen.said) >= 2
    monkeypatch.undo()
    cmsf.resume(tmp_path / "run", quiet=True, workers=0)


def test_a_loss_that_is_no_number_leaves_a_page_of_what_was_there(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, batches = Learner.step, []

    def poisoned(self: Learner, *given: Any) -> Any:
        batches.append(given[0].index.tolist())
        if len(batches) == 7:
            with torch.no_grad():
                self.encoders.predictor[-1].bias[3] = torch.inf
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", poisoned)
        with pytest.raises(
            cmsf.BadInput, match=r"step-00000004.json, is kept; train with a lower .*diverged.json says"
        ):
            cmsf.train("cmsf-self-small", bars, tmp_path / "run", quiet=True, **TINY)
    run = cmsf.Run(tmp_path / "run")
    about = json.loads(run.folder.divergence_file.read_text())
    assert (about["what"], about["after step"], about["epoch"]) == ("the loss is nan", 6, 1)
    assert about["losses"].keys() == {"loss", "loss_unconstrained", "loss_constrained"}
    assert about["losses"]["loss"] == "nan"
    assert about["not finite"] == {"predictor.3.bias": "1 of 16"}
    assert len(about["largest norms"]) == 20
    assert about["batch"]["index"] == batches[6]
    assert len(about["batch"]["path"]) == 32
    assert about["lr"] < 0.2
    assert about["precision"] == "fp32"
    assert "lower --lr" in about["what to do"]
    newest = checkpoint.latest(run.folder.checkpoints)
    assert newest is not None
    assert newest.name == "step-00000004.json"
    cmsf.resume(run.path, quiet=True)  # what was wrong is mended: it goes on, and the page goes
    assert not run.folder.divergence_file.exists()
