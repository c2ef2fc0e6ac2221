"""What a run leaves on the disk, and how it is read again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from cmsf import checkpoint
from cmsf.assembly import empty_backbone
from cmsf.data import Dataset
from cmsf.errors import BadInput
from cmsf.files import atomically, write_text
from cmsf.recipe import Recipe
from cmsf.rows import UNKNOWN

_BIT_FOR_BIT = ("machine", "device", "threads", "python", "torch", "torchvision", "timm", "numpy")
"""What has to be the same for a resumed run to equal an uninterrupted one to the last bit."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def backbone_file(self) -> Path:
        return self.path / "backbone.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def neighbours_picture(self) -> Path:
        return self.path / "neighbours.png"

    def exists(self) -> bool:
        return self.recipe_file.exists()

    def recipe(self) -> Recipe:
        if not self.exists():
            raise BadInput(f"{self.path} is no run: it has no recipe.yaml; give a folder that cmsf train wrote")
        return Recipe.from_yaml(self.recipe_file.read_text(encoding="utf-8"), str(self.recipe_file))

    def environment(self) -> dict[str, Any]:
        try:
            environment = json.loads(self.environment_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"cannot read {self.environment_file}: {error}") from None
        if not isinstance(environment, dict):
            raise BadInput(f"{self.environment_file} is not what cmsf train wrote")
        return environment

    def create(self, recipe: Recipe, environment: dict[str, Any], data: Dataset) -> None:
        """Lay down what is known before training. The recipe comes last: with it the folder is a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.environment_file, json.dumps(environment, indent=2) + "\n")
        with atomically(self.path / "data.parquet") as temporary:
            pq.write_table(_listing(data), temporary)
        write_text(self.recipe_file, recipe.to_yaml())

    def check_same(self, recipe: Recipe, environment: dict[str, Any]) -> list[str]:
        """Refuse a run of another recipe or other data; name what keeps a resume from being bit for bit."""
        before = self.environment()
        differences = recipe.differences(self.recipe())
        if before.get("data") != environment["data"]:
            differences.insert(0, f"data: {environment['data']} against {before.get('data')}")
        if differences:
            shown = "; ".join(differences[:4]) + (f" and {len(differences) - 4} more" if len(differences) > 4 else "")
            raise BadInput(f"{self.path} already holds another run ({shown}); choose another --out, or remove it")
        return [
            f"{name} was {before.get(name)} and is {environment[name]}"
            for name in _BIT_FOR_BIT
            if before.get(name) != environment[name]
        ]

    def save_backbone(self, backbone: nn.Module) -> None:
        tensors = {name: value.contiguous().cpu() for name, value in backbone.state_dict().items()}
        with atomically(self.backbone_file) as temporary:
            safetensors.torch.save_file(tensors, temporary)

    def load_backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """The trained network, in eval mode."""
        backbone = empty_backbone(self.recipe())
        if not self.backbone_file.exists():
            raise BadInput(
                f"{self.path} has no backbone.safetensors yet; give the same cmsf train command again to finish it"
            )
        try:
            state = safetensors.torch.load_file(self.backbone_file)
        except SafetensorError as error:
            raise BadInput(f"cannot read {self.backbone_file}: {error}") from None
        checkpoint.fill(backbone, state, self.backbone_file)
        return backbone.to(device).eval()

    def save_result(self, name: str, result: dict[str, Any]) -> Path:
        path = self.path / "results" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps(result, indent=2) + "\n")
        return path


def describe_environment(data: str, recipe: Recipe, device: str) -> dict[str, Any]:
    """Versions, seed, machine and commit: what one needs to know to get the same numbers again."""
    packages = ("torch", "torchvision", "timm", "numpy", "cmsf")
    return {
        "data": data,
        "seed": recipe.seed,
        "device": device,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": _commit(),
        "command": sys.argv,
    }


def _listing(data: Dataset) -> pa.Table:
    rows: dict[str, list[Any]] = {"path": [], "index": [], "label": [], "split": []}
    for name, split in (("train", data.train), ("test", data.test)):
        if split is not None:
            rows["path"] += split.paths
            rows["index"] += range(len(split))
            rows["label"] += [None if number == UNKNOWN else data.classes[number] for number in split.truth.tolist()]
            rows["split"] += [name] * len(split)
    types = {"path": pa.string(), "index": pa.int64(), "label": pa.string(), "split": pa.string()}
    return pa.table(rows, schema=pa.schema(list(types.items())))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, if it runs from one."""
    tree = Path(__file__).resolve().parents[2]
    if not (tree / ".git").exists():
        return None
    answer = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None
