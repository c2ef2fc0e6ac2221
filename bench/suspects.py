"""Wrong labels of CIFAR-10: how many of those that were put there `cmsf suspects` finds, and how its score was chosen.

    python bench/suspects.py --data DATA --out docs/results/suspects.json

DATA is where cifar10.npz is. A tenth of the labels of 10,000 training images is replaced; one run is trained without
labels and one with the noisy ones. Scores and k are compared on other images, with other noise, by the first run's
network; the reported images are looked at once, with the chosen score. A run that is there is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import subsets
import torch
from torch import Tensor

import cmsf
from cmsf.analysis.label_issues import KNN, THRESHOLD, compare_with_truth, score_labels
from cmsf.data import load_dataset, open_source
from cmsf.data.labels import Labels, add_noise
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.knn import k_nearest
from cmsf.recipes.recipe import Recipe
from cmsf.runs.environment import describe_machine
from cmsf.utils.files import write_text

RECIPES = {"cmsf-self": "without labels", "cmsf-sup": "with the noisy labels"}
EPOCHS, NOISE, SEED = 8, 0.1, 1
CHOOSING_SEED, KS = 0, (20, 50, 100, 200)
CHOOSING = {
    "10 % noise": (0.1, 0.0),
    "2 % noise": (0.02, 0.0),
    "10 % noise, the last class a fiftieth of the first": (0.1, 1.7),
}
"""The rate of the noise, and by how many powers of ten the sizes of the classes fall."""
CUTS = (0.5, 0.7, 0.8, 0.9, 0.95)
SPEED = (50_000, 512)


@dataclass(frozen=True)
class Vote:
    """Shares of a vote, an image a row; what a score has to go by."""

    share: Tensor
    label: Tensor

    @property
    def mine(self) -> Tensor:
        return self.share.gather(1, self.label[:, None])[:, 0]

    @property
    def other(self) -> Tensor:
        return self.share.scatter(1, self.label[:, None], -1.0).amax(1)

    @property
    def smoothed(self) -> Vote:
        return Vote(self.share + 0.1 * self.frequency, self.label)

    @property
    def frequency(self) -> Tensor:
        return self.label.bincount(minlength=self.share.shape[1]) / len(self.label)


def odds(vote: Vote) -> Tensor:
    """What cmsf suspects has, but for its leaving the image itself out of the frequencies too."""
    best = vote.smoothed
    return best.other / (best.other + best.mine)


def margin(vote: Vote) -> Tensor:
    return (1 - vote.mine + vote.other) / 2


def lack(vote: Vote) -> Tensor:
    return 1 - vote.mine


def calibrated(vote: Vote) -> Tensor:
    """Shares in units of what images with a label usually have, after confident learning (Northcutt et al. 2021),
    where a class's mean is the threshold to be sure of it."""
    usual = vote.label.bincount(vote.mine, minlength=vote.share.shape[1]) / vote.label.bincount().clamp_min(1)
    share = vote.share / usual.clamp_min(1e-6)
    return odds(Vote(share / share.sum(1, keepdim=True), vote.label))


SCORES: dict[str, Callable[[Vote], Tensor]] = {
    "odds of the best other class": odds,
    "margin of the best other class": margin,
    "what the label's share lacks": lack,
    "odds, calibrated by class": calibrated,
}
AGAIN = "odds, suspects' votes removed"


def choose(features: Tensor, truth: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """Every score with every k, by several settings; and the cuts of the one that was chosen."""
    found: dict[str, Any] = {}
    for setting, (rate, fall) in CHOOSING.items():
        size = torch.logspace(0, -fall, len(names))[truth]
        kept = torch.rand(len(truth), generator=torch.Generator().manual_seed(CHOOSING_SEED)) < size
        label = add_noise(Labels(truth[kept], names), rate, CHOOSING_SEED).number
        found[setting] = compare(features[kept], label, label != truth[kept], len(names))
    return found


def compare(features: Tensor, label: Tensor, wrong: Tensor, classes: int) -> dict[str, Any]:
    parts = list(k_nearest(features, features, max(KS), torch.arange(len(label))))
    near, similarity = (torch.cat(column) for column in zip(*parts, strict=True))
    weight = torch.exp(similarity / (KNN.temperature or 1))
    table: dict[str, Any] = {}
    for k in KS:
        some, theirs = near[:, :k], weight[:, :k]
        vote = counted(some, theirs, label, classes)
        scores = {name: score(vote) for name, score in SCORES.items()}
        trusted = (odds(vote) < THRESHOLD)[some].double().clamp_min(1e-9)
        scores[AGAIN] = odds(counted(some, theirs * trusted, label, classes))
        for name, score in scores.items():
            table.setdefault(name, {})[k] = measured(score, wrong)
    score = score_labels(features, label).score
    cuts = {cut: called(score >= cut, wrong) for cut in CUTS}
    return {"wrong": int(wrong.sum()), "images": len(wrong), "scores": table, "cuts": cuts}


def counted(near: Tensor, weight: Tensor, label: Tensor, classes: int) -> Vote:
    votes = torch.zeros(len(near), classes, dtype=torch.float64).scatter_add_(1, label[near], weight)
    return Vote(votes / votes.sum(1, keepdim=True), label)


def measured(score: Tensor, wrong: Tensor) -> dict[str, float]:
    """Per cent: average precision, and precision among the tenth of the images with the highest scores."""
    hit = wrong[score.argsort(descending=True, stable=True)].double()
    precision = hit.cumsum(0) / torch.arange(1, len(hit) + 1)
    average = float((precision * hit).sum() / hit.sum())
    return {"average precision": 100 * average, "precision at 10 %": 100 * float(hit[: len(hit) // 10].mean())}


def called(which: Tensor, wrong: Tensor) -> dict[str, float]:
    """Per cent."""
    both = int((which & wrong).sum())
    return {
        "called": 100 * float(which.double().mean()),
        "precision": 100 * both / max(1, int(which.sum())),
        "recall": 100 * both / max(1, int(wrong.sum())),
    }


def report(run: cmsf.Run) -> dict[str, Any]:
    """The reported images by the chosen score."""
    every = run.suspects(least=0.0)
    wrong = torch.tensor([one.truth != one.label for one in every])
    score = torch.tensor([one.score for one in every], dtype=torch.float64)
    hits = compare_with_truth(every, THRESHOLD)
    assert hits is not None
    mended = sum(one.suggested == one.truth for one in every if one.score >= THRESHOLD and one.truth != one.label)
    found = {"images": len(every), "wrong": hits.wrong, "called": hits.called, "both": hits.both}
    found |= {"precision": 100 * hits.precision, "recall": 100 * hits.recall}
    found |= measured(score, wrong) | {"suggested rightly, of wrong ones called": 100 * mended / max(1, hits.both)}
    return found | {"20-nn": run.evaluate("knn")["20-nn"]}


def speed() -> dict[str, Any]:
    """Seconds that the verdicts on many images take, features given; of all cores together, and by the clock."""
    images, width = SPEED
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(images, width, generator=generator), dim=1)
    label = torch.randint(100, (images,), generator=generator)
    before, clock = time.process_time(), time.monotonic()
    score_labels(features, label)
    busy, waited = time.process_time() - before, time.monotonic() - clock
    threads = torch.get_num_threads()
    return {"images": images, "features": width, "threads": threads, "busy": round(busy, 1), "clock": round(waited, 1)}


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Wrong labels found",
        "",
        "Written by `python bench/suspects.py`. CIFAR-10, 10,000 training images, each label replaced by another class "
        f"with probability {NOISE:g}; `-small` recipes, {EPOCHS} epochs, seed {SEED}. Suspects: a score of "
        f"{THRESHOLD:g} or above. Per cent; average precision of a random order would be the share of wrong labels.",
        "",
        *markdown(
            ("trained", "20-NN", "wrong", "called", "precision", "recall", "average precision", "precision at 10 %"),
            [
                (
                    f"{name}, {RECIPES[name]}",
                    f"{one['20-nn']:.1f}",
                    f"{one['wrong']:,} of {one['images']:,}",
                    f"{one['called']:,}",
                    *(f"{one[key]:.1f}" for key in ("precision", "recall", "average precision", "precision at 10 %")),
                )
                for name, one in found["reported"].items()
            ],
        ),
    ]
    lines += [
        "## How the score was chosen",
        "",
        f"On other images, with noise of seed {CHOOSING_SEED}, by the network of the run without labels. Where all "
        f"their labels are right, {found['false alarms']:.1f} % are called.",
        "",
    ]
    for setting, part in found["choosing"].items():
        lines += [
            f"### {setting}",
            "",
            f"{part['images']:,} images, {part['wrong']:,} labels wrong. Average precision, and precision among the "
            "tenth with the highest scores:",
            "",
            *markdown(
                ("score", *(f"k = {k}" for k in KS)),
                [
                    (
                        name,
                        *(f"{one['average precision']:.1f}, {one['precision at 10 %']:.1f}" for one in by_k.values()),
                    )
                    for name, by_k in part["scores"].items()
                ],
            ),
            f"The chosen one, the odds with k = {KNN.k}, by where it is cut:",
            "",
            *markdown(
                ("least score", "called", "precision", "recall"),
                [
                    (f"{float(cut):g}", *(f"{one[key]:.1f}" for key in ("called", "precision", "recall")))
                    for cut, one in part["cuts"].items()
                ],
            ),
        ]
    one = found["speed"]
    lines.append(
        f"{one['images']:,} images with {one['features']} features are judged in {one['busy']:.0f} s of work, all "
        f"cores together; torch had threads: {one['threads']}. The features are given."
    )
    return "\n".join(lines) + "\n"


def markdown(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ("---",) * len(heads), *rows)] + [""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/suspects"))
    given = parser.parse_args()
    settings = {"epochs": EPOCHS, "evaluate_every": 0, "label_noise": NOISE, "seed": SEED}
    source = subsets.cifar(given.data, given.runs, choosing=False)
    runs = {
        name: cmsf.train(f"{name}-small", source, given.runs / f"{name}-reported", quiet=True, **settings)
        for name in RECIPES
    }
    judge = runs["cmsf-self"]
    others = load_dataset(
        open_source(subsets.cifar(given.data, given.runs, choosing=True)), Recipe(), judge.recipe.size
    )
    features = FeatureExtractor(judge.backbone(), judge.preprocessing, cache=judge.folder.features)(others.train)
    found = {
        "reported": {name: report(run) for name, run in runs.items()},
        "choosing": choose(features, others.train.truth, others.classes),
        "false alarms": 100 * float((score_labels(features, others.train.truth).score >= THRESHOLD).double().mean()),
        "k": KNN.k,
        "temperature": KNN.temperature,
        "least": THRESHOLD,
        "speed": speed(),
    }
    text = json.dumps(found | describe_machine("cpu"), indent=1) + "\n"
    write_text(given.out, text)
    write_text(given.out.with_suffix(".md"), table(json.loads(text)))


if __name__ == "__main__":
    main()
