"""The cells of bench/semi.py as Markdown: mean over seeds, and the range.

python bench/semi_table.py docs/results/semi > docs/results/semi.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cells import mean_and_range
from semi import ABLATIONS, BASIC, EPOCHS, MSF, SEEDS, SEMI, Cell, Pretraining

Look = Callable[[dict[str, Any]], float | None]


def main() -> None:
    folder = Path(sys.argv[1])
    print("# Few labels on the embedded sample\n")
    print(
        f"10,000 training and 2,000 test images of Fashion-MNIST, the small residual net, {EPOCHS} epochs, "
        f"seeds {', '.join(map(str, SEEDS))}, which choose the labels too; per cent, mean over seeds "
        "(range). 20-NN: by the features of the pretraining and all training classes. Tuned: network and head "
        "on the labels. Xent: the same network from random weights on the labels alone, with as many forward passes as "
        f"pretraining and tuning together. Written by `bench/semi_table.py` from the [cells]({folder.name}).\n"
    )
    for share in (0.01, 0.1):
        rows = [
            (name, look(folder, about, share, None, near), look(folder, about, share, "whole", right),
             look(folder, about, share, "whole-2-rounds", right))
            for name, about in (("cmsf-semi", SEMI), ("cmsf-semi-basic", BASIC), ("msf", MSF))
        ]  # fmt: skip
        rows.append(("Xent on the labels alone", "–", look(folder, SEMI, share, "xent", right), "–"))
        show(f"{share:.0%} of the labels", ("", "20-NN", "tuned", "tuned in two rounds"), rows)
    guesses = [pseudo("share"), pseudo("accuracy_confident"), pseudo("accuracy_all")]
    rows = []
    for name, about in [
        ("0.85, online, two layers", SEMI),
        *((about.name.removeprefix("semi-"), about) for about in ABLATIONS),
    ]:
        cells = [look(folder, about, 0.1, None, one) for one in (near, *guesses)]
        rows.append((name, *cells, look(folder, about, 0.1, "whole", right)))
    heads = ("cmsf-semi with", "20-NN", "confident", "of these right", "of all right", "tuned")
    show("What matters in pseudo-labels: 10 % of the labels, last epoch", heads, rows)
    ways = {
        "linear layer alone": "linear",
        "head alone": "head",
        "whole network": "whole",
        "whole, two rounds": "whole-2-rounds",
    }
    rows = [
        (name, look(folder, SEMI, 0.1, way, right), look(folder, SEMI, 0.1, way, miscalibrated))
        for name, way in ways.items()
    ]
    show("How cmsf-semi is tuned: 10 % of the labels", ("", "accuracy", "calibration error"), rows)


def look(folder: Path, about: Pretraining, share: float, way: str | None, at: Look) -> str:
    """Mean and range over the seeds that are there."""
    files = [folder / f"{Cell(about, share, seed, way).name}.json" for seed in SEEDS]
    return mean_and_range((at(json.loads(file.read_text())) for file in files if file.exists()), len(SEEDS))


def near(cell: dict[str, Any]) -> float:
    return float(cell["figures"]["20-nn"])


def right(cell: dict[str, Any]) -> float:
    return float(cell["result"]["figures"]["classifier"])


def miscalibrated(cell: dict[str, Any]) -> float:
    return float(cell["result"]["calibration"]["expected calibration error"])


def pseudo(name: str) -> Look:
    def of(cell: dict[str, Any]) -> float | None:
        value = cell["by epoch"][-1][f"pseudo_{name}"]
        return None if value is None else 100 * float(value)

    return of


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"## {title}\n")
    for line in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(line)} |")
    print()


if __name__ == "__main__":
    main()
