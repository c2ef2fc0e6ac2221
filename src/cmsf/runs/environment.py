"""environment.json: versions, seed, machine and commit, to get the same numbers again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cmsf.data import DataConfig
from cmsf.recipes.recipe import ResolvedRecipe

BANK_SHARDED = "bank_sharded"
"""The key that says whether each process holds a share of the bank only."""
BIT_FOR_BIT = (
    *("machine", "device", "threads", "processes", BANK_SHARDED),
    *("python", "torch", "torchvision", "timm", "numpy", "pillow"),
)
"""Keys that must be equal for a resumed run to equal an uninterrupted one bit for bit."""
INIT_SHA256 = "init_sha256"
"""The key of the hash of the pretrained weights."""


def describe_environment(
    data_config: DataConfig, recipe: ResolvedRecipe, device: str, processes: int = 1, bank_sharded: bool = False
) -> dict[str, Any]:
    """Returns what a run records before it starts, but for the hash of its pretrained weights."""
    machine = {**describe_machine(device), "processes": processes, BANK_SHARDED: bank_sharded}
    return {**asdict(data_config), "seed": recipe.seed, **machine, "command": sys.argv}


def describe_machine(device: str) -> dict[str, Any]:
    """Returns device, threads, machine and versions."""
    packages = ("torch", "torchvision", "timm", "numpy", "pillow", "cmsf")
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    """Returns the commit of the source tree that this package runs from, if there is one."""
    tree = Path(__file__).resolve().parents[3]
    if not (tree / ".git").exists():
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # a tree with .git on a machine without git
        return None
    return answer.stdout.strip() or None
