"""What tests of whole runs have in common: small settings, what a run wrote, and whether two are the same."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cmsf
from cmsf.runs import checkpoint
from cmsf.runs.checkpoint import Checkpoint
from cmsf.runs.log import TIMING_FIELDS
from cmsf.utils.files import file_sha256
from cmsf.utils.screen import Screen

NEED_FEW_LABELS = ("cmsf-semi", "cmsf-semi-basic", "paws", "fixmatch")
TINY = {"epochs": 3, "batch_size": 32, "log_every": 2, "projection_hidden": 32, "projection_dim": 16}


def metrics(run: cmsf.Run, *kinds: str) -> list[dict[str, Any]]:
    """The lines of these kinds; without any, those of steps and epochs."""
    return [line for line in whole_log(run) if line["kind"] in (kinds or ("step", "epoch"))]


def whole_log(run: cmsf.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]


def state(run: cmsf.Run) -> dict[str, Any]:
    """What the newest checkpoint holds, the cache with its changes in it."""
    newest = checkpoint.latest(run.folder.checkpoints)
    assert newest is not None
    contents = Checkpoint.read(newest).load()
    cache = contents["cache"]["embedding"] if "cache" in contents else None
    if "changed" in contents:
        cache[contents["changed"]["index"]] = contents["changed"]["embedding"]
    return contents["state"] | {"cache": cache}


def scalars(run: cmsf.Run) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, but for what is a matter of time."""
    shown = EventAccumulator(str(run.folder.tensorboard), size_guidance={"scalars": 0})
    shown.Reload()
    names = [name for name in shown.Tags()["scalars"] if name.split("/")[1] not in TIMING_FIELDS]
    return {name: [(event.step, event.value) for event in shown.Scalars(name)] for name in names}


def replace_part(manifest: Path, name: str, content: Any) -> None:
    """Put something else into a checkpoint, in a way that its hashes do not tell."""
    about = json.loads(manifest.read_text())
    file = manifest.parent / about["parts"][name]["file"]
    torch.save(content, file)
    about["parts"][name] |= {"size": file.stat().st_size, "sha256": file_sha256(file)}
    rewrite(manifest, about)


def rewrite(manifest: Path, about: dict[str, Any]) -> None:
    """Have a manifest say something else, with the hash that belongs to it."""
    manifest.write_text(json.dumps(about | {"sha256": checkpoint.sha256_of_manifest(about)}))


def assert_same(first: Any, second: Any) -> None:
    """To the last bit, NaN included."""
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first.keys() - {"metrics_length"}:
            assert_same(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def assert_same_run(first: cmsf.Run, second: cmsf.Run) -> None:
    untimed = [
        [{k: v for k, v in line.items() if k not in TIMING_FIELDS} for line in whole_log(run)]
        for run in (first, second)
    ]
    assert untimed[0] == untimed[1]
    assert_same(state(first), state(second))
    assert_same(load_file(first.folder.backbone_file), load_file(second.folder.backbone_file))


class StopAt(Screen):
    """Sends this very process a signal at a step, as a user or a scheduler would."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(quiet=True)
        self.at, self.signal_number = step, signal_number

    def step(self, step: int, line: Any) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.signal_number)
