"""What every benchmark tells of its run: the machine, the versions, and whether it reached what was wanted."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

QUIET = 0.3
"""How many busy cores we take for none."""


INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What products of matrices are made of: the speed of a processor hangs on those that it has."""


@dataclass(frozen=True)
class Target:
    """What we mean to reach."""

    what: str
    reached: float
    wanted: float | None
    """None: a figure that is told and not judged."""
    unit: str = ""
    """What a reached 1 would be, such as the limit or another's speed."""
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}

    def __str__(self) -> str:
        if self.wanted is None:
            return f"{self.what}: {self.reached:,.3g} {self.unit}"
        goal = f"{'at most' if self.at_most else 'at least'} {self.wanted:,.3g}"
        return f"{self.what}: {self.reached:,.3g} {self.unit}, wanted {goal}: {'met' if self.met else 'missed'}"


def describe_run(packages: Sequence[str]) -> dict[str, Any]:
    return {
        "machine": _describe_machine(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "commit": _commit(),
        # Where things lie on this machine is nobody's business.
        "command": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def announce(console: Console, machine: dict[str, Any], threads: int) -> None:
    console.print(f"{machine['cpu']}, {machine['cores']} cores; torch threads: {threads}", markup=False)
    if machine["load before"] > QUIET:
        console.print(f"[yellow]others are at work (load {machine['load before']}): no figures to keep[/]")


def measure_from_command_line(
    about: str | None, measure: Callable[[int], dict[str, Any]], packages: Sequence[str] = ("cmsf", "torch", "numpy")
) -> None:
    """Runs a benchmark that takes a number of rounds and returns its figures, among them `targets`; writes them."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    report = describe_run(packages)
    announce(Console(highlight=False), report["machine"], os.cpu_count() or 1)
    found = measure(given.rounds)
    for target in found["targets"]:
        print(target, flush=True)
    write(report | found | {"targets": [target.record() for target in found["targets"]]}, given.out)


def write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _describe_machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in INSTRUCTIONS if flag in flags],
        "architecture": platform.machine(),
        "system": platform.system(),
        "load before": round(busy_cores(), 2),
    }


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores others keep busy. The load average would count the benchmark that ran just before this one."""

    def read() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]  # idle, and waiting for a disk

    try:
        (total, idle), _, (later, later_idle) = read(), time.sleep(seconds), read()
    except OSError:  # not Linux
        return os.getloadavg()[0]
    return (os.cpu_count() or 1) * (1 - (later_idle - idle) / max(1, later - total))


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
