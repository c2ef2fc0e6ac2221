"""Versions, seed, machine and commit: what one needs to know to get the same numbers again."""

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

from cmsf.data import DataRequest
from cmsf.recipes.recipe import Resolved

BANK_SHARDED = "bank_sharded"
"""Where it is recorded whether each process holds but a share of the bank."""
BIT_FOR_BIT = (
    *("machine", "device", "threads", "processes", BANK_SHARDED),
    *("python", "torch", "torchvision", "timm", "numpy", "pillow"),
)
"""What has to be the same for a resumed run to equal an uninterrupted one to the last bit."""
INIT_SHA256 = "init_sha256"
"""Where the hash of the weights that a run started from is recorded."""


def describe_environment(
    request: DataRequest, recipe: Resolved, device: str, processes: int = 1, bank_sharded: bool = False
) -> dict[str, Any]:
    """What a run records of itself before it starts; the hash of its starting weights comes to it."""
    machine = {**describe_machine(device), "processes": processes, BANK_SHARDED: bank_sharded}
    return {**asdict(request), "seed": recipe.seed, **machine, "command": sys.argv}


def describe_machine(device: str) -> dict[str, Any]:
    """What computed a figure."""
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
    """The commit of the source tree that this package runs from, if it runs from one."""
    tree = Path(__file__).resolve().parents[2]
    if not (tree / ".git").exists():
        return None
    command = ["git", "-C", str(tree), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # a tree with .git on a machine without git
        return None
    return answer.stdout.strip() or None
