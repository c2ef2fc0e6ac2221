"""Writes docs/benchmarks.md from the files of the benchmarks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reporting import QUIET

Found = dict[str, Any]

HEAD = """# Benchmarks

Written by `make bench`, which measures what has no file in [results/bench](results/bench) yet. Do not edit.

All contestants of a table ran in one process or in turns, on one machine. A figure is the median of the rounds unless
its script says otherwise. The docstring of each script says what is measured, and how.
"""


def write_page(path: Path, rows: Sequence[tuple[str, str, str, Found | None]]) -> None:
    """rows: title, limit, name and file of each benchmark; None where it was not run."""
    parts = [HEAD]
    machines = sorted({_machine(found) for _, _, _, found in rows if found is not None})
    lines = [textwrap.fill(machine, 118, initial_indent="- ", subsequent_indent="  ") for machine in machines]
    parts.append("\n".join(["Machine and versions:", "", *lines]))
    goals = [target["met"] for _, _, _, found in rows if found for target in find_targets(found)]
    judged = [met for met in goals if met is not None]
    parts.append(f"{sum(judged)} of {len(judged)} goals are met. Misses are marked, and explained at the end.")
    for title, limit, name, found in rows:
        parts.append(_section(title, limit, name, found))
    remarks = path.parent / "results" / "bench" / "remarks.md"
    if remarks.exists():
        parts.append(remarks.read_text(encoding="utf-8").strip())
    path.write_text("\n\n".join(part.strip("\n") for part in parts) + "\n", encoding="utf-8")


def find_targets(found: Any) -> Iterator[Found]:
    """Yields the targets of a file, in whatever part of it they are."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key == "targets":
                yield from value
            else:
                yield from find_targets(value)


def _section(title: str, limit: str, name: str, found: Found | None) -> str:
    lines = [f"## {title}", ""]
    if found is None:
        return "\n".join([*lines, "Not measured yet."])
    load = found["machine"]["load before"] if isinstance(found["machine"], dict) else None
    busy = f"\nThe machine was not idle (load {load}): take these figures with care." if load and load > QUIET else ""
    where = f"{found['begun'][:10]}, {found['machine']['cpu']}"
    lines += [f"Limit: {limit}.", f"File: [{name}](results/bench/{name}.json), {where}.{busy}", ""]
    lines += ["| what | figure | | goal | |", "| --- | ---: | --- | --- | --- |"]
    for target in find_targets(found):
        goal = met = "–"
        if target["wanted"] is not None:
            goal = f"{'at most' if target['at_most'] else 'at least'} {_number(target['wanted'])}"
            met = "met" if target["met"] else "**missed**"
        lines.append(f"| {target['what']} | {_number(target['reached'])} | {target['unit']} | {goal} | {met} |")
    if name == "growth":
        lines += ["", "![time and memory by the number of images, on logarithmic axes](images/growth.png)"]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _machine(found: Found) -> str:
    machine, versions = found["machine"], found["versions"]
    about = ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine.get("instructions", ())])
    return f"{about}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
