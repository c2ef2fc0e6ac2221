"""cmsf train --resume: a run's folder says all that is needed to go on, and nothing else is listened to."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import write_npz
from runs import TINY, StopAt, assert_same_run

import cmsf
from cmsf.cli import main
from cmsf.training.signals import Stopped

SETTINGS = TINY | {"labels_per_class": 8, "seed": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with labels and test images of its own, whole and in half."""
    folder = tmp_path_factory.mktemp("resume")
    bars, val = write_npz(folder / "bars.npz"), write_npz(folder / "val.npz", per_class=4)
    assert main(["labels", str(bars), "--per-class", "20", "--out", str(folder / "few.csv")]) == 0
    given = {"labels": folder / "few.csv", "val": val}
    cmsf.train("cmsf-semi-small", bars, folder / "whole", quiet=True, **given, **SETTINGS)
    with pytest.raises(Stopped):
        cmsf.train("cmsf-semi-small", bars, folder / "half", screen=StopAt(6, signal.SIGTERM), **given, **SETTINGS)
    return folder


@pytest.fixture
def half(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "half", tmp_path / "half"))


def test_a_run_goes_on_with_nothing_but_its_folder(
    half: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the images are found from anywhere
    assert main(["train", "--resume", "half"]) == 0
    assert "resuming from step 6 of 15" in capsys.readouterr().err
    assert_same_run(cmsf.Run(place / "whole"), cmsf.Run(half))
    before = {path: path.stat().st_mtime_ns for path in half.rglob("[!.]*")}
    assert main(["train", "--resume", "half"]) == 0
    assert "is complete already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in half.rglob("[!.]*")} == before


@pytest.mark.usefixtures("one_thread")
def test_a_run_goes_on_with_as_many_threads_as_it_had(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = half / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"threads": 1}))
    torch.set_num_threads(2)
    assert main(["train", "--resume", str(half)]) == 0
    assert torch.get_num_threads() == 1
    assert "threads was" not in capsys.readouterr().err


def test_what_is_given_again_must_be_the_same(half: Path, place: Path) -> None:
    for given in ({"epochs": 4}, {"val": place / "bars.npz"}, {"data": place / "val.npz"}, {"bank_size": "auto"}):
        with pytest.raises(
            cmsf.BadInput, match=rf"was started with other settings \({next(iter(given))}: .* against .*leave them out"
        ):
            cmsf.resume(half, quiet=True, **given)
    run = cmsf.resume(half, place / "bars.npz", val=place / "val.npz", quiet=True, epochs=3, seed=3, workers=0)
    assert_same_run(cmsf.Run(place / "whole"), run)


def test_what_a_recipe_does_not_have_is_refused(half: Path) -> None:
    with pytest.raises(cmsf.BadInput, match="a recipe has no 'epoch'; did you mean epochs"):
        cmsf.resume(half, quiet=True, epoch=4)


def test_data_that_would_be_downloaded_into_a_folder_of_its_choice_is_not(half: Path, tmp_path: Path) -> None:
    environment = json.loads((half / "environment.json").read_text())
    there = f"torchvision:CIFAR10@{tmp_path}/elsewhere"
    (half / "environment.json").write_text(json.dumps(environment | {"data": there}))
    for looking in (lambda: cmsf.resume(half, quiet=True), lambda: cmsf.Run(half).data()):
        with pytest.raises(cmsf.BadInput, match="is not on this machine; to fetch it, give it with --data"):
            looking()
    assert not (tmp_path / "elsewhere").exists()


def test_data_that_is_a_shell_command_is_not_run(half: Path, tmp_path: Path) -> None:
    environment = json.loads((half / "environment.json").read_text())
    (half / "environment.json").write_text(json.dumps(environment | {"data": f"wds:pipe:touch {tmp_path}/ran"}))
    with pytest.raises(cmsf.BadInput, match="is a shell command"):
        cmsf.resume(half, quiet=True)
    assert not (tmp_path / "ran").exists()


def test_the_same_command_still_goes_on(half: Path, place: Path) -> None:
    given = {"labels": place / "few.csv", "val": place / "val.npz"}
    run = cmsf.train("cmsf-semi-small", place / "bars.npz", half, quiet=True, **given, **SETTINGS)
    assert_same_run(cmsf.Run(place / "whole"), run)
