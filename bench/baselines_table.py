"""The cells of bench/baselines.py as Markdown: mean over seeds, and the range.

python bench/baselines_table.py docs/results/baselines > docs/results/baselines.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import coarse as look_at
from baselines import COARSE, EPOCHS, LRS, NOISY, NONE, SEEDS, TRIALS, WITH_LABELS, WITHOUT, Cell, chosen_lr, trial
from cells import mean_and_range, read

Figure = Callable[[dict[str, Any]], float]
SETS = ("flowers102", "caltech101")


def main() -> None:
    folder = Path(sys.argv[1])
    print(f"""# CMSF beside its baselines

The small residual net, {EPOCHS} epochs of two forward passes an image (cross-entropy: {2 * EPOCHS} of one), batch 128,
seeds {", ".join(map(str, SEEDS))}, which choose the noise too; per cent, mean over seeds (range). The learning rate is
the best of {", ".join(map(str, LRS))} by 20-NN on other images with seed 0, for each method; for coarse labels it is
the one chosen on Fashion-MNIST. Linear: a layer on frozen features, fitted to convergence on the true classes of the
training images. Transfer: a linear layer on other data sets, settings by {TRIALS} trials. What is equal are forward
passes: cross-entropy, SimCLR and NNCLR go back through each of them, the others through one of two, so by the paper's
formula (a backward pass is two) they compute 1.5 times as much. SupCon's warm-up, a twentieth of the epochs, is none of
{EPOCHS}. Written by `bench/baselines_table.py` from the [cells]({folder.name}).
""")
    for task in NOISY:
        noise = "true labels" if task == "clean" else f"{task.removeprefix('noise-')} % of the labels replaced"
        _with_labels(folder, task, f"10,000 embedded images of Fashion-MNIST, {noise}; 2,000 test images")
    _lost(folder)
    coarse = "10,000 images of Tiny-ImageNet at 32 px, WordNet's groups as labels"
    _with_labels(folder, COARSE, f"{coarse}; judged by the 200 classes, 5,000 test images")
    _why_coarse(folder.with_name("coarse"), folder)
    rows = [
        (
            name,
            _seeds(folder, method, NONE, _near),
            _seeds(folder, method, NONE, _linear),
            str(chosen_lr(folder, method)),
        )
        for name, method in WITHOUT.items()
    ]
    _show("10,000 images of CIFAR-10 without labels; 10,000 test images", ("", "20-NN", "linear", "lr"), rows)
    rows = [
        (name, *(_one(folder, trial(method, lr).name, _near) for lr in LRS))
        for name, method in (WITH_LABELS | WITHOUT).items()
    ]
    heads = ("20-NN", *(f"lr {lr}" for lr in LRS))
    _show(
        "How the learning rates were chosen: other images of Fashion-MNIST, or of CIFAR-10 without labels, seed 0",
        heads,
        rows,
    )


def _with_labels(folder: Path, task: str, title: str) -> None:
    rows = []
    for name, method in WITH_LABELS.items():
        figures = (_near, _linear, *map(_transfer, SETS))
        rows.append((name, *(_seeds(folder, method, task, figure) for figure in figures)))
    _show(title, ("", "20-NN", "linear", *(f"to {name}" for name in SETS)), rows)
    judged = "groups" if task == COARSE else "classes"
    print(f"Xent's own classifier, on the true {judged}: {_seeds(folder, 'xent', task, _classifier)}.\n")


def _why_coarse(folder: Path, usual: Path) -> None:
    """What was looked at to find out why coarse labels come out as they do (bench/coarse.py)."""
    print(f"Why it is so, by `bench/coarse.py` ([cells]({folder.name})):\n")
    before = [read(folder, look_at.untrained(seed).name) for seed in SEEDS]
    rows = [
        (
            name,
            mean_and_range((None if cell is None else cell["knn"][name]["20-nn"] for cell in before), len(SEEDS)),
            mean_and_range(
                (
                    None if cell is None or name not in cell["linear"] else cell["linear"][name]["linear top-1"]
                    for cell in before
                ),
                len(SEEDS),
            ),
        )
        for name in ("raw pixels", "untrained encoder")
    ]
    _show("Coarse labels: what is there before anything is learned", ("", "20-NN", "linear"), rows)
    seed, rows = SEEDS[0], []
    for name, method in WITH_LABELS.items():
        if method not in look_at.LONGER_METHODS:
            continue
        short, long = Cell(method, COARSE, seed).name, look_at.longer(method, seed).name
        figures = [
            _one(place, cell, figure) for figure in (_near, _linear) for place, cell in ((usual, short), (folder, long))
        ]
        rows.append((name, *figures))
    times = look_at.LONGER
    heads = ("", "20-NN", f"{times} times as long", "linear", f"{times} times as long")
    _show(f"Coarse labels: {EPOCHS} epochs of two passes, and {times * EPOCHS}, seed {seed}", heads, rows)
    rows = [
        (f"{lr}", f"{momentum}", *(_one(folder, look_at.tried(lr, momentum).name, f) for f in (_near, _linear)))
        for lr, momentum in look_at.TRIED
    ]
    heads = ("learning rate", "momentum of the target", "20-NN", "linear")
    _show(
        "Coarse labels: other settings of CMSF top-10, on other images of Tiny-ImageNet (8,000 and 2,000), seed 0",
        heads,
        rows,
    )


def _lost(folder: Path) -> None:
    """What half of the labels wrong takes away, seed by seed."""
    rows = []
    for name, method in WITH_LABELS.items():
        losses = []
        for figure in (_near, _linear, *map(_transfer, SETS)):
            values = []
            for seed in SEEDS:
                clean, noisy = (read(folder, Cell(method, task, seed).name) for task in ("clean", "noise-50"))
                values.append(None if clean is None or noisy is None else figure(clean) - figure(noisy))
            losses.append(mean_and_range(values, len(SEEDS)))
        rows.append((name, *losses))
    _show("What 50 % of noise takes away: points lost, of the same seed", ("", "20-NN", "linear", *SETS), rows)


def _near(cell: dict[str, Any]) -> float:
    return float(cell["knn"]["20-nn"])


def _linear(cell: dict[str, Any]) -> float:
    return float(cell["linear"]["linear top-1"])


def _classifier(cell: dict[str, Any]) -> float:
    return float(cell["classifier"]["classifier"])


def _transfer(name: str) -> Figure:
    return lambda cell: float(cell["transfer"][name])


def _seeds(folder: Path, method: str, task: str, figure: Figure) -> str:
    found = [read(folder, Cell(method, task, seed).name) for seed in SEEDS]
    return mean_and_range((None if cell is None else figure(cell) for cell in found), len(SEEDS))


def _one(folder: Path, name: str, figure: Figure) -> str:
    cell = read(folder, name)
    return "–" if cell is None else f"{figure(cell):.2f}"


def _show(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"## {title}\n")
    for line in (heads, ["---"] * len(heads), *rows):
        print(f"| {' | '.join(line)} |")
    print()


if __name__ == "__main__":
    main()
