"""The command line: mistakes get one line, exit code 2, and leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from forked import cmsf_command
from helpers import write_npz, write_photos
from runs import replace_part

import cmsf
from cmsf.cli import main
from cmsf.cli.train import COMMON
from cmsf.evaluation.finetune import FineTuneSettings
from cmsf.recipes.recipe import Recipe
from cmsf.runs.checkpoint import Checkpoint

FAST = ["--epochs", "1", "--batch-size", "32", "--projection-hidden", "16", "--projection-dim", "8"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the command says when it refuses."""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code == 2, said
    lines = [line for line in said.err.splitlines() if line.startswith("cmsf: ")]
    assert len(lines) == 1, said.err
    assert "Traceback" not in said.err
    assert len(lines[0]) < 300
    return lines[0]


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "bars.npz")


@pytest.fixture
def brief_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 epochs of few labels and not 500 steps, and short trials; what either finds is other files' to test."""
    monkeypatch.setattr("cmsf.evaluation.few_labels.FineTuneSettings", partial(FineTuneSettings, min_steps=0))
    monkeypatch.setattr("cmsf.evaluation.transfer.trial._ITERATIONS", (1, 12))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["train"], "cmsf train needs a RECIPE, or --resume RUN"),
        (["train", "msf", "--checkpoint-minutes", "-1"], "invalid value --checkpoint-minutes -1"),
        (["train", "msf", "--checkpoint-minutes", "nan"], "invalid value --checkpoint-minutes nan"),
        (["train", "msf", "--checkpoint-minutes", "often"], "invalid value --checkpoint-minutes often"),
        (["train", "msf", "--on-full-disk", "weep"], "invalid value --on-full-disk weep; expected stop or go-on"),
        (["train", "msf", "--on-collapse", "weep"], "invalid value --on-collapse weep; expected warn or stop"),
        (["train", "msf", "--resume", "run"], "--resume uses the recipe of run; leave out msf"),
        (["train", "--resume", "run", "--out", "other"], "--resume continues run; leave out --out other"),
        (["train", "--resume", "nowhere"], "no such run: nowhere"),
        (["train", "cmsf-slef"], "unknown recipe 'cmsf-slef'; did you mean cmsf-self?"),
        (["train", "nothing-like-it"], "cmsf recipes lists them all"),
        (["train", "msf", "--epoch", "3"], "cmsf train has no --epoch; did you mean --epochs?"),
        (["train", "msf", "--labl-share", "1"], "cmsf train has no --labl-share; did you mean --label-share?"),
        (["train", "msf", "--epochs", "none"], "invalid value --epochs none; expected a whole number"),
        (["train", "msf", "--lr=-1"], "--lr -1.0 is out of range; use at least 0"),
        (["train", "msf", "--threads", "0"], "invalid value --threads 0"),
        (["train", "msf", "--threads", "9" * 20], "invalid value --threads 1e+20; expected a whole number from 1"),
        (["train", "msf", "--k", "["], "invalid value --k [; expected a whole number or all"),
        (["train", "msf", "--device", "meta"], "--device meta is not available"),
        (["train", "msf", "--out", "x" * 300], "cannot be used: File name too long"),
        (["train", "msf", "--out", "/dev/null/run"], "cannot make the run folder /dev/null/run"),
        (["train", "msf", "--device", "abacus"], "--device abacus is not available"),
        (["train", "nowhere.yaml"], "no such recipe file: nowhere.yaml"),
        (["train", "msf", "--data", "nowhere"], "no such file or folder: nowhere"),
        (["train", "msf", "--backbone", "resnet81"], "unknown backbone 'resnet81'; did you mean resnet18?"),
        (["recipes", "msf-smal"], "did you mean msf-small?"),
        (["evaluate", "nowhere"], "no such run: nowhere"),
        (["evaluate", "x" * 256], "no such run: xxx"),
        (["train", "x" * 300], "unknown recipe 'xxx"),
        (["evaluate"], "the following arguments are required: RUN"),
        (["evaluate", "nowhere", "--with", "lineer"], "unknown evaluation 'lineer'; did you mean linear?"),
        (["flops", "cmsf-selv-small"], "unknown recipe 'cmsf-selv-small'; did you mean cmsf-self-small?"),
        (["flops", "runs/nowhere"], "no such run: runs/nowhere"),
        (["flops", "nowhere.yaml"], "no such recipe file: nowhere.yaml"),
        (["flops", "."], ". is not a run: it has no recipe.yaml"),
        (["flops", "msf"], "msf has no scale; use msf-small or msf-standard"),
        (["flops", "x" * 5000], "unknown recipe"),
        (["flops", "msf-small", "--images", "0"], "invalid value --images 0; expected a whole number from 2"),
        (["flops", "msf-small", "--images", "many"], "invalid value --images many"),
        (["flops", "msf-standard"], "give --images N"),
        (["flops", "--images", "10"], "--images is for recipes, and none is given"),
        (["flops", "msf-small", "--out", "x.png"], "--out draws runs, and none is given"),
        (["flops", "--published"], "give --out FILE with it"),
        (["flops", "msf-small", "--published", "--out", "x.png"], "and no recipes or runs"),
        (["flops", "--published", "--out", "x.pdf"], "invalid value --out x.pdf; expected a .png or .svg file"),
        (
            ["flops", "--published", "--out", "no/x.png"],
            "invalid value --out no/x.png; expected a file in an existing folder",
        ),
    ],
)
def test_a_mistake_is_named_with_the_remedy(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bank-size", "1000"], "--bank-size 1000 exceeds the 144 images"),
        (["--bank-size", "1000"], "use 144 or less, or auto"),
        (["--warmup-epochs", "5", "--epochs", "5"], "leaves nothing of --epochs 5"),
        (["--k", "all"], "pulls every image to the mean of the bank"),
        (["--backbone", "levit_128s", "--size", "30"], "does not work with images of 30 px"),
        (["--batch-size", "500"], "--batch-size 500 exceeds the 144 images"),
        (["--batch-size", "64", "--bank-size", "40"], "--batch-size 64 exceeds --bank-size 40"),
        (["--k", "145"], "--k 145 exceeds the bank's 144 rows"),
        (["--constraint", "companion", "--companion-k", "200"], "--companion-k 200 exceeds the bank's 144 rows"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_with_the_numbers(
    flags: list[str], message: str, bars: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refusal(capsys, "train", "msf-small", "--data", bars, "--out", tmp_path / "run", *flags)
    assert message in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bars.npz"]


def test_a_supervised_recipe_needs_labels_of_two_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.zeros((40, 16, 16), np.uint8)
    np.savez(tmp_path / "none.npz", x=images)
    np.savez(tmp_path / "one.npz", x=images, y=np.zeros(40, int), classes=np.array(["cat"]))
    np.savez(tmp_path / "some.npz", x=images, y=np.arange(40) % 3 - 1)
    out = tmp_path / "run"
    said = refusal(capsys, "train", "cmsf-sup", "--data", tmp_path / "none.npz", "--out", out)
    assert "none of the 40 images has one" in said
    said = refusal(capsys, "train", "cmsf-sup", "--data", tmp_path / "one.npz", "--out", out)
    assert "needs two classes or more, and all 36 labels are 'cat'" in said
    said = refusal(capsys, "train", "cmsf-sup-all", "--data", tmp_path / "some.npz", "--out", out)
    assert "have none; use --k 10" in said
    assert not out.exists()


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "no images below" in refusal(capsys, "train", "msf", "--data", tmp_path / "empty", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_something_else_is_not_touched(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", "msf-small", "--data", str(bars), "--out", str(out), *FAST]
    assert main(command) == 0
    assert "already holds another run (lr: 0.01 against" in refusal(capsys, *command, "--lr", "0.01")
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    assert "is not empty and is not a run" in refusal(
        capsys, "train", "msf", "--data", bars, "--out", tmp_path / "diary"
    )
    assert "is a file" in refusal(capsys, "train", "msf", "--data", bars, "--out", bars)
    assert [path.name for path in (tmp_path / "diary").iterdir()] == ["monday.txt"]


def test_the_current_folder_can_be_the_run_if_it_is_empty(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "is not empty and is not a run" in refusal(capsys, "train", "msf-small", "--data", bars, "--out", ".")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["train", "msf-small", "--data", str(bars), "--out", ".", *FAST]) == 0
    assert (tmp_path / "here" / "backbone.safetensors").exists()


def test_a_run_folder_with_foreign_files_is_refused(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "msf-small", "--data", str(bars), "--out", str(out), *FAST]) == 0
    kept = {name: (out / name).read_bytes() for name in ("recipe.yaml", "environment.json", "data.parquet")}
    for name, foreign, message in (
        ("recipe.yaml", b"\xff\xfe", "byte 0 is not UTF-8"),
        ("recipe.yaml", kept["recipe.yaml"].replace(b"size: 16", b"size: auto"), "invalid value --size auto"),
        ("environment.json", b"{}", "is not what cmsf train wrote"),
        ("data.parquet", b"PAR1", "cannot read"),
    ):
        (out / name).write_bytes(foreign)
        assert message in refusal(capsys, "evaluate", out)
        (out / name).write_bytes(kept[name])
    assert main(["evaluate", str(out)]) == 0


def test_weights_of_another_architecture_are_refused(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", "msf-small", "--data", str(bars), "--out", str(out), *FAST]
    assert main(command) == 0
    weights = out / "backbone.safetensors"
    safetensors.torch.save_file({"stem.0.weight": torch.zeros(1)}, weights)
    assert "is of another architecture than the recipe" in refusal(capsys, "evaluate", out)
    weights.unlink()
    for manifest in (out / "checkpoints").glob("*.json"):
        state = Checkpoint.read(manifest).load()["state"]
        replace_part(manifest, "state", state | {"encoders": {"online.weight": torch.zeros(3)}})
    assert "is of another architecture than the recipe" in refusal(capsys, *command)
    for manifest in (out / "checkpoints").glob("*.json"):
        replace_part(manifest, "state", {"encoders": 3})
    assert "lacks what a checkpoint has" in refusal(capsys, *command)
    for path in (out / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:500])
    assert "remove that folder to begin again" in refusal(capsys, *command)
    weights.write_bytes(b"nothing")
    assert "cannot read" in refusal(capsys, "evaluate", out)


@pytest.mark.usefixtures("all_rows")
def test_train_then_evaluate_prints_the_table(bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "cmsf-self", "--data", str(bars), "--out", str(out), *FAST]) == 0
    assert "cmsf-self is cmsf-self-small here: the images are 16 px" in capsys.readouterr().err
    assert main(["evaluate", str(out), "--references"]) == 0
    table = capsys.readouterr().out
    for words in (
        "16 of 160 labelled images, held out by seed 0",
        "raw pixels",
        "untrained encoder",
        "trained encoder",
        "1-NN",
        "20-NN",
        "neighbours.png",
    ):
        assert words in table


def test_several_evaluations_share_a_table_and_each_leaves_its_protocol(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "run"
    assert main(["train", "cmsf-self", "--data", str(bars), "--out", str(out), *FAST]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(out), "--references", "--with", "knn", "linear", "retrieval"]) == 0
    table = capsys.readouterr().out
    assert all(words in table for words in ("20-NN", "linear top-1", "R@10"))
    for metric, name in (("knn", "20-nn"), ("linear", "linear top-1"), ("retrieval", "R@5")):
        result = json.loads((out / "results" / f"{metric}.json").read_text())
        measure = result["measures"][name]["accuracy"]
        assert measure["value"] == pytest.approx(result["figures"][name])
        assert measure["low"] <= measure["value"] <= measure["high"]
        assert f"{measure['value']:.2f} ± {(measure['high'] - measure['low']) / 2:.1f}" in table
        assert (out / "results" / f"{metric}-untrained-encoder.json").exists()


@pytest.mark.usefixtures("brief_tuning")
def test_runs_may_stand_after_the_evaluations_and_the_table_be_markdown(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "cmsf-self", "--data", str(bars), "--out", str(out), *FAST]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--threads", "1", "--format", "markdown", "--with", "knn", "few-labels", str(out)]) == 0
    table = capsys.readouterr().out
    assert f"| {out} |" in table
    assert all(words in table for words in ("20-NN", "1 % linear", "10 % tuned"))
    result = json.loads((out / "results" / "few-labels.json").read_text())
    assert result["protocol"]["train images"] == {"1 %": 4, "10 %": 15}
    assert "unknown evaluation 'nothing'" in refusal(capsys, "evaluate", "--with", "knn", "nothing", out)
    assert "RUN" in refusal(capsys, "evaluate", "--with", "knn")
    assert "--suite is for transfer" in refusal(capsys, "evaluate", out, "--suite", tmp_path / "no.yaml")
    assert "--trials 0" in refusal(capsys, "evaluate", out, "--with", "transfer", "--trials", "0")
    # What was found is shown, though the second evaluation cannot be made.
    assert main(["evaluate", str(out), "--with", "knn", "transfer", "--suite", str(tmp_path / "no.yaml")]) == 2
    printed = capsys.readouterr()
    assert "20-NN" in printed.out
    assert "cannot read" in printed.err


@pytest.mark.usefixtures("brief_tuning")
def test_few_labels_may_be_given_as_lists_and_searches_kept_in_a_database(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, few, suite = tmp_path / "run", tmp_path / "few.csv", tmp_path / "suite.yaml"
    assert main(["train", "cmsf-self", "--data", str(bars), "--out", str(out), *FAST]) == 0
    assert main(["labels", str(bars), "--per-class", "5", "--out", str(few)]) == 0
    suite.write_text(f"bars: {bars}\n")
    database = f"sqlite:///{tmp_path / 'search.db'}"
    arguments = ["--with", "few-labels", "transfer", "--few", str(few), "--suite", str(suite), "--trials", "2"]
    capsys.readouterr()
    assert main(["evaluate", str(out), *arguments, "--storage", database, "--workers", "1", "--threads", "1"]) == 0
    assert "few linear" in capsys.readouterr().out
    run = cmsf.Run(out)
    result = run.result("few-labels", lists=[few])
    assert 10 < result["protocol"]["train images"]["few"] <= 20  # a tenth of all is held out
    assert {"torch", "threads", "device", "commit"} <= result.keys()
    assert (tmp_path / "search.db").exists()
    assert "sqlite" not in run.result_file("transfer", suite=suite).read_text()
    assert "data" not in run.result("transfer", suite=suite)
    assert "two lists" in refusal(capsys, "evaluate", out, "--with", "few-labels", "--few", few, few)


def test_one_run_that_cannot_be_judged_does_not_keep_others_from_being_compared(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blank = write_npz(tmp_path / "blank.npz", labelled=False)
    for name, data in (("blind", blank), ("seen", bars)):
        assert main(["train", "cmsf-self", "--data", str(data), "--out", str(tmp_path / name), *FAST]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--format", "markdown", str(tmp_path / "blind"), str(tmp_path / "seen")]) == 2
    printed = capsys.readouterr()
    blind, seen = printed.out.splitlines()[-2:]
    assert f"| {tmp_path / 'blind'} | – |" in blind
    assert f"| {tmp_path / 'seen'} | " in seen
    assert "±" in seen
    assert "blind: the training images of blank have no labels" in printed.err


@pytest.mark.usefixtures("brief_tuning")
def test_transfer_from_a_suite_leaves_its_journal_and_goes_on_from_it(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "cmsf-self", "--data", str(bars), "--out", str(out), *FAST]) == 0
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"bars: {bars}\n")
    arguments = ["evaluate", str(out), "--with", "transfer", "--suite", str(suite), "--workers", "1"]
    assert main([*arguments, "--trials", "3"]) == 0
    first = cmsf.Run(out).result("transfer", suite=suite)
    assert main([*arguments, "--trials", "5"]) == 0
    second = cmsf.Run(out).result("transfer", suite=suite)
    assert "bars" in capsys.readouterr().out
    counts = [sum(one["protocol"]["data sets"]["bars"]["trials"].values()) for one in (first, second)]
    assert counts == [3, 5]
    assert main([*arguments, "--trials", "4"]) == 0
    assert "5 trials were there already, more than the 4 asked for" in " ".join(capsys.readouterr().err.split())
    assert len(list((out / "results" / "transfer").glob("bars-*.journal"))) == 1


def test_a_folder_in_the_place_of_a_recipe_is_understood(
    bars: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert f"cmsf train cmsf-self --data {bars}" in refusal(capsys, "train", bars)
    (tmp_path / "file.txt").write_text("no run")
    assert "is not a run" in refusal(capsys, "evaluate", tmp_path)


def test_recipes_are_listed_and_a_printed_one_can_be_trained(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes"]) == 0
    assert "cmsf-sup-all" in capsys.readouterr().out
    assert main(["recipes", "cmsf-self-small"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert main(["train", str(tmp_path / "mine.yaml"), "--data", str(bars), "--out", str(tmp_path / "run"), *FAST]) == 0
    assert cmsf.Run(tmp_path / "run").recipe.epochs == 1


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_process_after_a_checkpoint(signal_number: int, code: int, bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ("--epochs", "2000", "--log-every", "1", "--threads", "1")
    process = cmsf_command("train", "cmsf-self-small", "--data", bars, "--out", out, *given)
    patience = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_bytes()) < 3000:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.1)
    process.send_signal(signal_number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "the same command resumes from there" in said
    assert "Traceback" not in said
    assert list((out / "checkpoints").glob("step-*.json"))


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--optimizer", "--optimiser x; expected sgd or lars"),
        ("--grayscale", "--greyscale x; expected a number"),
        ("--solarize", "--solarise x; expected a number"),
        ("--unlabeled-weight", "--unlabelled-weight x; expected a number"),
    ],
)
def test_a_flag_is_taken_in_american_spelling_too(flag: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "msf", flag, "x"]) == 2
    assert expected in capsys.readouterr().err


def test_train_takes_keywords_in_both_spellings(tmp_path: Path) -> None:
    data, out = write_npz(tmp_path / "bars.npz"), tmp_path / "run"
    with pytest.raises(cmsf.BadInput, match="optimizer=lars and optimiser=sgd are the same setting"):
        cmsf.train("msf-small", data, out, optimizer="lars", optimiser="sgd")
    assert not out.exists()


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; from cmsf.cli import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def shown_by(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_flags_people_use_and_help_all_shows_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = shown_by("--help", capsys), shown_by("--help-all", capsys)
    common = [name for names in COMMON.values() for name in names]
    settings = [field.name.replace("_", "-") for field in fields(Recipe) if field.name != "name"]
    assert set(re.findall(r"^  --([a-z-]+)", short, re.MULTILINE)) == {*common, "help-all"}
    assert {*common, *settings, "bank-sharded"} <= set(re.findall(r"^  --([a-z-]+)", whole, re.MULTILINE))
    assert [title for title in COMMON if f"\n{title}:\n" not in short] == []
    assert "all others" not in short
    assert len(short.splitlines()) < 70 < len(whole.splitlines())


def test_a_run_that_is_missing_is_said_without_waiting_for_torch(tmp_path: Path) -> None:
    commands = [
        ["evaluate", "nowhere"],
        ["evaluate", "nowhere", "--with", "few-labels", "--references"],
        ["evaluate", "x", "--with", "lineer"],
        ["report", "nowhere"],
        ["suspects", "nowhere"],
        ["finetune", "nowhere"],
        ["predict", "nowhere", "--data", "x"],
        ["embed", "nowhere"],
        ["train", "--resume", "nowhere"],
    ]
    script = (
        f"import sys; from cmsf.cli import main; print([main(c) for c in {commands}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [str([2] * len(commands)), "False"]
    said = done.stderr.splitlines()
    assert "unknown evaluation 'lineer'" in said.pop(2)
    assert said == ["cmsf: no such run: nowhere"] * (len(commands) - 1)


def test_a_folder_that_is_no_run_is_said_without_waiting_for_torch(tmp_path: Path) -> None:
    script = "import sys; from cmsf.cli import main; print(main(['report', '.']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "2 False\n"
    assert "is not a run: it has no recipe.yaml; give a folder that cmsf train wrote" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "5000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "1000"}, "1000")],
)
def test_threads_that_wait_spin_briefly_unless_the_user_chose_otherwise(chosen: dict[str, str], expected: str) -> None:
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = "import os; from cmsf.cli import main; main(['recipes']); print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, env=unset | chosen, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("load", "flags", "advice"),
    [(1.2, [], "the load of the last minute is 1.2 on 4 cores; if other work goes on, --threads 3 may be faster"),
     (9.0, [], "--threads 1 may be faster"), (0.3, [], ""), (1.2, ["--threads", "2"], ""), (1.2, ["--quiet"], "")],
)  # fmt: skip
def test_beside_other_work_fewer_threads_are_recommended(
    load: float,
    flags: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("cmsf.data.available_cores", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # or all later tests would have so many
    arguments = ["train", "msf-small", "--data", str(tmp_path / "nowhere"), "--device", "cpu", *flags]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert (advice or "cmsf: no such file or folder") in said
    assert bool(advice) == ("other work" in said)


def test_importing_the_library_changes_no_environment_variable() -> None:
    script = (
        "import os; before = dict(os.environ); import cmsf; cmsf.train; raise SystemExit(before != dict(os.environ))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_photos_of_one_class_are_learned_from_without_labels(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=30, classes=1, side=40)
    assert main(["train", "cmsf-self", "--data", str(photos), "--out", str(tmp_path / "run"), "--epochs", "1"]) == 0
