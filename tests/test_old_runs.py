"""A run folder of version 0.1, written before the modules were in packages, goes on working.

tests/fixtures/run-0.1/stopped was ended by SIGTERM in the middle of its second epoch; finished/ is what the same code
made of it.
"""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same, metrics
from safetensors.torch import load_file

import cmsf
from cmsf.cli import main
from cmsf.runs.log import TIMING_FIELDS

OLD = Path(__file__).parent / "fixtures" / "run-0.1"


@pytest.fixture
def run(tmp_path: Path, one_thread: None) -> Path:
    """The stopped run beside its images, which its folder names by an absolute path."""
    shutil.copytree(OLD / "stopped", tmp_path / "run")
    shutil.copy(OLD / "bars.npz", tmp_path)
    file = tmp_path / "run" / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data": str(tmp_path / "bars.npz")}))
    return tmp_path / "run"


def without_timing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMING_FIELDS} for line in lines]


def processor() -> list[str]:
    """What decides which kernels are used, and so the last bits of a sum."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().split("\n\n")[0].splitlines() if file.exists() else []
    fields = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return [f"{name}: {fields.get(name)}" for name in wanted] + [f"torch: {torch.__version__}"]


def test_an_old_run_is_resumed_to_the_weights_and_the_log_that_the_old_code_made(run: Path) -> None:
    resumed = cmsf.resume(run, device="cpu", quiet=True)
    expected = [json.loads(line) for line in (OLD / "finished" / "metrics.jsonl").read_text().splitlines()]
    lines = metrics(resumed)
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    weights, old = load_file(run / "backbone.safetensors"), load_file(OLD / "finished" / "backbone.safetensors")
    assert weights.keys() == old.keys()
    for name, value in old.items():  # on another processor the same but for rounding
        torch.testing.assert_close(weights[name], value, rtol=5e-2, atol=1e-2)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=2e-2)
    if processor() == (OLD / "processor.txt").read_text().splitlines():
        assert_same(weights, old)
        assert without_timing(lines) == without_timing(expected)


def test_an_old_run_is_evaluated_to_the_figures_of_the_old_code(run: Path) -> None:
    for name in ("backbone.safetensors", "metrics.jsonl"):
        shutil.copy(OLD / "finished" / name, run)
    old = json.loads((OLD / "finished" / "results" / "knn.json").read_text())
    found = cmsf.Run(run)
    assert found.evaluate("knn", device="cpu", workers=0) == old["figures"]
    new = found.result("knn")
    assert new.keys() == old.keys()
    assert new["measures"].keys() == old["measures"].keys()
    assert new["protocol"].keys() == old["protocol"].keys() | {"preprocessing"}
    assert new["weights_sha256"] == old["weights_sha256"]


def test_an_old_run_is_reported(run: Path) -> None:
    for name in ("backbone.safetensors", "metrics.jsonl"):
        shutil.copy(OLD / "finished" / name, run)
    assert main(["report", str(run), "--device", "cpu", "--threads", "1", "--workers", "0"]) == 0
    page = (run / "report.html").read_text()
    assert "cmsf-self-small" in page
    assert "Purity" in page
    last = json.loads((OLD / "finished" / "metrics.jsonl").read_text().splitlines()[-1])
    words = [word.strip() for word in re.split(r"<[^>]+>", page) if word.strip()]
    expected = {
        "training images": "144",
        "20-NN": f"{last['20-nn']:.2f} %",
        "loss": f"{last['loss']:.3f}",
        "purity": f"{100 * last['purity_constrained']:.0f} %",
        "median rank": f"{last['rank_median']:.0f}",
    }
    assert expected.items() <= set(itertools.pairwise(words))
    assert "purity of the last bank" in words  # the bank of its checkpoint
