"""python -m soak --minutes 30 --out docs/results/soak.json, with tests on the path. Exit code 1 if anything was lost,
differed or grew. The report goes to `--out` and, as a page, beside it."""

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cmsf.runs.environment import describe_machine
from soak.faults import METHODS, OFTEN, Soak
from soak.watch import Watch


def main() -> int:
    chosen = arguments()
    begun, load = datetime.now(UTC), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = Soak(Path(name), chosen.minutes, chosen.seed)
        watch = Watch(Path(name) / "long", [next(iter(METHODS)), "--data", str(soak.images), "--threads", "1", *OFTEN])
        watch.start()
        try:
            soak.go()
        finally:
            long = watch.end()
    found = soak.report
    wrong = found.wrong + ([] if long["flat"] else [f"the long-lived process is not flat: {long}"])
    report = {
        "verdict": "Nothing was lost, and nothing was different." if not wrong else f"WRONG: {wrong}",
        "minutes": chosen.minutes,
        "seed": chosen.seed,
        "faults": dict(found.counts),
        "seconds from SIGTERM to exit": found.stops,
        "cells": found.cells,
        "long-lived process": long,
        "machine": describe_machine("cpu"),
        "load before": round(load, 2),
        "begun": begun.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - begun).total_seconds()),
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    chosen.out.with_suffix(".md").write_text(page(report), encoding="utf-8")
    print(page(report))
    return 1 if wrong else 0


def page(report: dict[str, Any]) -> str:
    columns = ("cell", "method", "fault", "seconds")
    rows = [
        f"| {' | '.join(str(cell[name]) for name in columns)} | {'; '.join(cell['wrong']) or 'same'} |"
        for cell in report["cells"]
    ]
    long = report["long-lived process"]
    faults = ", ".join(f"{count} × {name}" for name, count in report["faults"].items())
    where = report["machine"]["machine"]
    return "\n".join(
        [
            "# Under faults",
            "",
            f"`make soak` for {report['minutes']:g} minutes on {where}: {faults}. {report['verdict']}",
            "",
            "Each cell is a run that met its faults, went on, and was compared at its end, bit for bit, with a run",
            "that nothing happened to: weights, optimiser, bank, cache, progress, metrics but for times.",
            "",
            "| cell | recipe | fault | seconds | compared |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"SIGTERM to exit: {max(report['seconds from SIGTERM to exit'], default=0)} s at most. A process that",
            f"trained all the time grew by {100 * long['growth']:.2f} % after its first quarter (allowed: 2 %),",
            f"with {long['open files']['first']} open files then and {long['open files']['last']} at the end.",
            "",
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long; what has begun is finished")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/soak.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
