"""Runs the benchmarks that are missing, one after another, and writes docs/benchmarks.md.

    python bench/run.py                     the rows that have no file in docs/results/bench yet
    python bench/run.py --row search busy   these rows, again
    python bench/run.py --page              the page alone

Stopped at any time, it goes on with the first row that is missing. Figures are worth keeping only from an idle machine;
the page says which were not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import write_page

from cmsf.cli import SPIN_COUNT

BENCH = Path(__file__).parent
RESULTS, PAGE = Path("docs/results/bench"), Path("docs/benchmarks.md")


@dataclass(frozen=True)
class Row:
    """A benchmark: the title of its table, its limit, and its command."""

    title: str
    limit: str
    command: tuple[str, ...]
    takes_images: bool = False


_NETWORK = "the passes through the network: the step with views that are there beforehand"
_PRODUCT = "the matrix product of the queries with the rows, which an exact search cannot avoid"
ROWS = {
    "startup": Row("Starting", "loading torch", ("startup.py",)),
    "search": Row("Searching the bank", _PRODUCT, ("search.py",)),
    "overhead": Row("Search and bank in a step of ResNet-50", _PRODUCT, ("overhead.py",)),
    "training-small-32": Row(
        "Training the small residual net, 32 px", _NETWORK, ("training.py", "--net", "small-32"), takes_images=True
    ),
    "training-resnet18-32": Row(
        "Training a ResNet-18 with a 3 × 3 stem, 32 px",
        _NETWORK,
        ("training.py", "--net", "resnet18-32"),
        takes_images=True,
    ),
    "training-resnet18-128": Row(
        "Training a ResNet-18 from JPEGs, 128 px", _NETWORK, ("training.py", "--net", "resnet18-128")
    ),
    "training-resnet50-224": Row(
        "Training a ResNet-50 from JPEGs, 224 px", _NETWORK, ("training.py", "--net", "resnet50-224", "--rounds", "3")
    ),
    "limit": Row("Raising the limit", "the processor", ("limit.py",)),
    "busy": Row("Training beside other work", "the fair share of the cores", ("busy.py", "--rounds", "3")),
    "memory": Row("Memory", "the parts that have to be there", ("memory.py",)),
    "growth": Row("Growth with the number of images", "–", ("growth.py",)),
    "evaluation": Row("k-NN and the linear fit", _PRODUCT, ("evaluation.py",)),
    "ranks": Row("Searching the bank with two processes", "half of one process's time", ("ranks.py",)),
    "report": Row("The report's analysis and page", _PRODUCT, ("report.py",)),
    "views": Row("Making views at 32 px", "–", ("data.py", "--part", "A"), takes_images=True),
    "photos": Row("Reading JPEGs into views at 224 px", "decoding", ("data.py", "--part", "B")),
    "transfer": Row("A transfer search of 60 trials", "the fits that are not pruned", ("transfer.py",)),
    "saving": Row("Saving checkpoints", "the copy of the state in memory", ("saving.py", "--rounds", "3")),
}


def run(name: str, row: Row, cifar: Path | None) -> bool:
    """Measures a row and writes its file; returns whether it succeeded."""
    out = RESULTS / f".{name}.json"  # a row that is stopped leaves no file of its own
    images = ["--cifar", str(cifar)] if row.takes_images and cifar is not None else []
    command = [sys.executable, str(BENCH / row.command[0]), *row.command[1:], *images, "--out", str(out)]
    # All contestants wait as the command line does: spinning would slow those that have worker processes beside them.
    environment = os.environ if name == "busy" else {"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ}
    print(f"— {name}", flush=True)
    start = time.monotonic()
    if subprocess.run(command, env=environment, check=False).returncode:
        print(f"{name} failed; go on with `make bench ROW={name}`", file=sys.stderr)
        return False
    found: dict[str, Any] = json.loads(out.read_text())
    found["minutes"] = round((time.monotonic() - start) / 60, 1)
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    out.rename(RESULTS / f"{name}.json")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=ROWS, default=[], help="measure these again")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--cifar", type=Path, help="an .npz with CIFAR-10's x_train; else made-up images")
    given = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    succeeded = True
    for name, row in ROWS.items():
        wanted = name in given.row if given.row else not (RESULTS / f"{name}.json").exists()
        if wanted and not given.page:
            succeeded &= run(name, row, given.cifar)
    found = {name: RESULTS / f"{name}.json" for name in ROWS}
    write_page(
        PAGE,
        [
            (row.title, row.limit, name, json.loads(found[name].read_text()) if found[name].exists() else None)
            for name, row in ROWS.items()
        ],
    )
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
