"""From a run and labelled images to a classifier on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cmsf.analysis.figures.confusion import draw_confusion
from cmsf.analysis.figures.reliability import draw_reliability
from cmsf.data import DataRequest, Dataset
from cmsf.evaluation.calibration import calibration, confusion
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.finetune import (
    CONFIDENCE_THRESHOLD,
    HEAD,
    LINEAR,
    FineTuneMode,
    FineTuneSettings,
    Round,
    fine_tune_in_rounds,
    make_classifier,
)
from cmsf.evaluation.metrics import Result
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.method.build import initial_backbone, pretrained_weights
from cmsf.models.backbones import feature_width
from cmsf.recipes.recipe import Resolved
from cmsf.runs.classifier_folder import ClassifierFolder
from cmsf.runs.environment import INIT_SHA256, describe_environment, describe_machine
from cmsf.runs.run import CLASSIFIER, Run
from cmsf.training.resolve import check_every_class_labelled
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput
from cmsf.utils.files import file_sha256


@dataclass(frozen=True)
class How:
    """What is asked of fine-tuning."""

    rounds: int
    tune: FineTuneMode
    random_weights: bool
    seed: int
    course: FineTuneSettings


@dataclass(frozen=True)
class Tuned:
    """A classifier, what each round of it came to, and its scores of the images it is judged on."""

    network: nn.Sequential
    width: int
    rounds: list[dict[str, Any]]
    scores: Float[Tensor, "n c"] | None


def to_learn_from(data: Dataset) -> Dataset:
    """The same images, the classes of their labels being those with a labelled image; or what they lack."""
    train = data.train
    if not len(train.labelled):
        raise BadInput(
            f"none of the {len(train)} training images of {data.name} has a label; give a list with --labels, "
            "or images in a folder for each class with --data"
        )
    present = train.label[train.labelled].unique()
    names = tuple(data.label_names[number] for number in present.tolist())
    if len(names) < 2:
        raise BadInput(
            f"all {len(train.labelled)} labels of {data.name} are {names[0]!r}; a classifier needs two classes or more"
        )
    check_every_class_labelled(data)
    number = torch.full((len(data.label_names) + 1,), UNKNOWN)  # the last is for UNKNOWN, which is -1
    number[present] = torch.arange(len(present))
    return replace(data, label_names=names, train=replace(train, label=number[train.label]))


def tune(
    run: Run,
    data: Dataset,
    held_out: EvaluationSet | None,
    how: How,
    like: FeatureExtractor,
    say: Callable[[str], None],
) -> Tuned:
    """Fine-tune the network that `like` holds; the truth is for the figures that are said and kept alone."""
    width = feature_width(like.backbone, run.recipe.backbone, run.recipe.size)
    network = make_classifier(like, width, len(data.label_names), how.seed, how.tune)
    rounds, scores = [], None
    for done in fine_tune_in_rounds(
        network, data.train, like, how.seed, rounds=how.rounds, mode=how.tune, settings=how.course
    ):
        scores = None if held_out is None else predict_scores(network, held_out.split, like)
        rounds.append(
            _report(done, data, None if held_out is None or scores is None else held_out.accuracy(scores).percent)
        )
        say(_in_words(rounds[-1]))
    if len(rounds) < how.rounds:
        left = len(data.train) - len(data.train.labelled)
        why = (
            f"none of {left} others is sure from {CONFIDENCE_THRESHOLD:g} on"
            if left
            else "all training images are labelled"
        )
        say(f"{why}, so there is no round {len(rounds) + 1}")
    return Tuned(network, width, rounds, scores)


def starting_network(run: Run, how: How) -> nn.Module:
    """The run's backbone, or one that has learned nothing."""
    if how.random_weights:
        return initial_backbone(replace(run.recipe, seed=how.seed)).float()
    return run.backbone().float()


def write(
    folder: ClassifierFolder,
    run: Run,
    recipe: Resolved,
    request: DataRequest,
    data: Dataset,
    held_out: EvaluationSet | None,
    how: How,
    like: FeatureExtractor,
    tuned: Tuned,
) -> None:
    """All of the folder, or nothing."""
    with folder.drafted() as path:
        draft = ClassifierFolder(path)
        device = str(like.device)
        start = pretrained_weights(recipe)
        origin = {"finetuned_from": str(run.path.absolute()), INIT_SHA256: None if start is None else start.sha256}
        environment = describe_environment(request, recipe, device) | origin
        backbone, head = tuned.network
        draft.describe(recipe, environment, data)
        draft.save_backbone(backbone)
        draft.save_head(head)
        draft.save_about(_about(data, how, like, tuned))
        if held_out is not None and tuned.scores is not None:
            known = {
                "metric": CLASSIFIER,
                "data": request.data,
                "val": request.val,
                "recipe": recipe.name,
                "weights_sha256": file_sha256(draft.backbone_file),
                "head_sha256": file_sha256(draft.head_file),
                "written": datetime.now(UTC).isoformat(timespec="seconds"),
                **describe_machine(device),
            }
            _write_figures(draft, data, held_out, how, like, tuned.scores, known)


def _write_figures(
    draft: ClassifierFolder,
    data: Dataset,
    held_out: EvaluationSet,
    how: How,
    like: FeatureExtractor,
    scores: Float[Tensor, "n c"],
    known: dict[str, Any],
) -> None:
    protocol = {
        "tuned": how.tune,
        "transform": like.transform,
        "train images": len(data.train),
        "labelled": len(data.train.labelled),
        "test images": len(held_out.split),
        "classes": len(data.label_names),
        "test split": data.test_origin,
    }
    found = calibration(scores, held_out.truth)
    report = Result({CLASSIFIER: held_out.accuracy(scores)}, protocol).report()
    draft.save_result(draft.results / f"{CLASSIFIER}.json", known | report | {"calibration": found.report()})
    counts = confusion(scores.argmax(1), held_out.truth, len(data.label_names))
    draft.save_confusion(counts, data.label_names)
    draw_confusion(counts, data.label_names, draft.confusion_picture)
    draw_reliability(found, draft.calibration_picture)


def _about(data: Dataset, how: How, like: FeatureExtractor, tuned: Tuned) -> dict[str, Any]:
    return {
        "classes": list(data.label_names),
        "tune": how.tune,
        "head": LINEAR if how.tune == "linear" else HEAD,
        "features": tuned.width,
        "random weights": how.random_weights,
        "seed": how.seed,
        "size": like.size,
        "transform": like.transform,
        "confident from": CONFIDENCE_THRESHOLD,
        "rounds": tuned.rounds,
    }


def _report(done: Round, data: Dataset, test_accuracy: float | None) -> dict[str, Any]:
    truth = data.as_label(data.train.truth)[done.pseudo]
    known = truth != UNKNOWN
    right = float((done.guess == truth)[known].double().mean()) if known.any() else None
    return {
        "round": done.number,
        "labelled": done.labelled,
        "unlabelled": len(data.train) - done.labelled,
        "confident": len(done.pseudo) if done.number > 1 else None,
        "pseudo-label accuracy": None if right is None else 100 * right,
        "test accuracy": test_accuracy,
        "course": done.schedule,
    }


def _in_words(report: dict[str, Any]) -> str:
    words = [f"round {report['round']}: {report['labelled']} labelled images"]
    if report["round"] > 1:
        words[0] += (
            f" and {report['confident']} of {report['unlabelled']} others, confident from {CONFIDENCE_THRESHOLD:g} on"
        )
        if report["pseudo-label accuracy"] is not None:
            words.append(f"{report['pseudo-label accuracy']:.2f} % of these pseudo-labels are right")
    if report["test accuracy"] is not None:
        words.append(f"test accuracy {report['test accuracy']:.2f} %")
    return "; ".join(words)
