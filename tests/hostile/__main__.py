"""Run many hostile cases, and print what came of them: python -m hostile --cases 2000 --seed 0"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from hostile.kinds import KINDS
from hostile.running import Outcome, planned, run_cases
from hostile.stock import make_stock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", type=int, help="the case of this number alone, with all that it printed")
    parser.add_argument("--verbose", action="store_true", help="all that every case printed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a Markdown file for the result")
    chosen = parser.parse_args()
    plan = planned(chosen.cases, chosen.kinds)
    if chosen.only is not None:
        plan = [(kind, chosen.only) for kind in chosen.kinds]
    begun = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        stock = make_stock(Path(place) / "stock")
        for outcome in run_cases(stock, plan, chosen.seed, Path(place), chosen.processes):
            outcomes.append(outcome)
            if outcome.complaints:
                print(f"{outcome.kind} {outcome.number}: {'; '.join(outcome.complaints)}", flush=True)
            if chosen.only is not None or chosen.verbose:
                print(outcome)
    report = as_markdown(outcomes, chosen.seed, time.monotonic() - begun)
    print(report)
    if chosen.out is not None:
        chosen.out.write_text(report, encoding="utf-8")
    return int(any(outcome.complaints for outcome in outcomes))


def as_markdown(outcomes: Sequence[Outcome], seed: int, seconds: float) -> str:
    lines = [
        "# Hostile input",
        "",
        f"`make fuzz`: {len(outcomes):,} cases, seed {seed}, {seconds:.0f} s, Python {platform.python_version()}, "
        f"Pillow {version('pillow')}, torch {version('torch')}.",
        "",
        "| kind | cases | read | refused in a line | complaints | slowest, s | most memory, MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in (*dict.fromkeys(outcome.kind for outcome in outcomes), None):
        some = [outcome for outcome in outcomes if kind in (None, outcome.kind)]
        codes = Counter(outcome.exit_code for outcome in some if not outcome.complaints)
        bad = sum(bool(outcome.complaints) for outcome in some)
        slowest, largest = max(one.seconds for one in some), max(one.megabytes for one in some)
        title = kind or "**all**"
        lines.append(f"| {title} | {len(some):,} | {codes[0]:,} | {codes[2]:,} | {bad} | {slowest:.1f} | {largest:,} |")
    lines += ["", *(f"- {one.kind} {one.number}: {'; '.join(one.complaints)}" for one in outcomes if one.complaints)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
