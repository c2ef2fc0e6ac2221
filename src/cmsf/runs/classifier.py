"""A classifier on the disk: fine-tuned from a run, and what it predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cmsf.analysis.figures.classifier import draw_confusion, draw_reliability
from cmsf.analysis.figures.gallery import draw_neighbours
from cmsf.data import Dataset
from cmsf.data.loader import worker_count
from cmsf.data.sources.table import is_parquet, write_csv, write_parquet
from cmsf.evaluation.features import FeatureExtractor
from cmsf.evaluation.finetune import (
    CONFIDENCE_THRESHOLD,
    HEAD,
    LINEAR,
    FineTuneSettings,
    Round,
    fine_tune_in_rounds,
    make_classifier,
)
from cmsf.evaluation.metrics import Result, calibration, confusion
from cmsf.evaluation.model_selection import TuneOption, select_mode
from cmsf.evaluation.predict import PLACES, Prediction, predict, predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.method.build import initial_backbone, pretrained_weights
from cmsf.models.backbones import feature_width
from cmsf.models.expected_input import input_metadata
from cmsf.models.weights import save_weights
from cmsf.runs.environment import INIT_SHA256, describe_environment
from cmsf.runs.folder import RunFolder
from cmsf.runs.requests import CLASSIFIER
from cmsf.runs.run import Run, result_header
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_out, file_sha256, report_write_errors
from cmsf.utils.progress import track


class Classifier(Run):
    """What cmsf finetune wrote, or a run with a classifier trained along; it is a run as well."""

    def __init__(self, path: str | Path, test_result: dict[str, Any] | None = None) -> None:
        """Opens the folder; test_result: figures of the test images, where the classifier has just been fine-tuned."""
        super().__init__(path)
        self.test_result = test_result
        self.about: dict[str, Any] = self.folder.classifier()
        """Classes, and how they were learned, round by round."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the scores."""
        return tuple(self.about["classes"])

    def network(self, device: torch.device | str = "cpu") -> nn.Sequential:
        """Returns backbone and head in eval mode: images in, a score for each class out."""
        return self.folder.load_classifier(device)

    def predict(
        self, data: str | Path | None, out: str | Path | None = None, device: str = "auto", workers: int | None = None
    ) -> list[Prediction]:
        """Returns a prediction for each image of a source, in the order train, val, test.

        An image that cannot be read has its error instead. out: a .csv or .parquet to write them to.
        """
        file = None if out is None else check_out(out, ".csv", ".parquet", ".pq")
        torch_device = pick_device(device)
        network = self.network(torch_device)
        extractor = FeatureExtractor(network[0], self.preprocessing, torch_device, worker_count(workers))
        predictions: list[Prediction] = []
        for images in self.source_splits(data):
            predictions += predict(network, images.split, extractor, self.classes)
        if file is not None:
            _write_predictions(file, predictions, min(PLACES, len(self.classes)))
        return predictions


def _write_predictions(out: Path, predictions: Sequence[Prediction], places: int) -> None:
    """Writes a row for each image; the file also serves as a list of labels."""
    numbers = ["", *(f"_{place}" for place in range(2, places + 1))]
    header = ["path", *(f"{name}{number}" for number in numbers for name in ("label", "confidence")), "error"]
    tracked = track(predictions, f"writing {out.name}", len(predictions))
    rows = [_fields(prediction, places) for prediction in tracked]
    with report_write_errors(out, "give another --out"):
        if is_parquet(out):
            columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
            write_parquet(out, columns, [name for name in header if name.startswith("confidence")])
        else:
            write_csv(out, header, ([f"{x:.6f}" if isinstance(x, float) else x for x in row] for row in rows))


def _fields(prediction: Prediction, places: int) -> list[str | float | None]:
    pairs = zip(prediction.labels, prediction.confidences, strict=True)
    fields: list[str | float | None] = [field for pair in pairs for field in pair]
    return [prediction.path, *(fields or [None] * (2 * places)), prediction.error]


@dataclass(frozen=True)
class FinetuneOptions:
    rounds: int
    tune: TuneOption
    random_weights: bool
    seed: int
    schedule: FineTuneSettings


def finetune_run(
    run: Run,
    options: FinetuneOptions,
    folder: RunFolder,
    data: str | Path | None,
    labels: str | Path | None,
    device: torch.device,
    workers: int,
    print_line: Callable[[str], None],
) -> dict[str, Any] | None:
    """Fine-tunes the network of a run on its images or others, and writes the classifier into a new folder.

    Returns the test result; None where no test image has a class that is among the labels.
    """
    data_config = run.data_config(data, labels)
    extractor = FeatureExtractor(starting_network(run, options).to(device), run.preprocessing, device, workers)
    images = labelled_classes_only(run.data(data, labels))
    recipe = replace(
        run.recipe_for(data, labels),
        cache="ram" if images.in_memory else "off",
        precision="fp32",
        init="none" if options.random_weights else str(run.path.absolute()),
        init_by_order=False,
    )
    for line in images.describe():
        print_line(line)
    held_out = EvaluationSet.of(images)
    if held_out is None:
        print_line("no test image has a class that is among the labels, so there is no accuracy and no calibration")
    network, about, scores = tune_in_rounds(run, images, held_out, options, extractor, print_line)
    result = None
    with folder.draft() as draft:
        start = pretrained_weights(recipe)
        origin = {"finetuned_from": str(run.path.absolute()), INIT_SHA256: None if start is None else start.sha256}
        draft.describe(recipe, describe_environment(data_config, recipe, str(device)) | origin, images)
        save_weights(network[0], draft.backbone_file, input_metadata(recipe))
        draft.save_classifier(network[1], about)
        if held_out is not None and scores is not None:
            hashes = {"weights_sha256": file_sha256(draft.backbone_file), "head_sha256": file_sha256(draft.head_file)}
            result = result_header(CLASSIFIER, data_config, recipe, hashes, device)
            result |= _write_test_figures(draft, images, held_out, about, scores)
            draft.save_result(draft.results / f"{CLASSIFIER}.json", result)
    try:
        picture = folder.neighbours_picture
        draw_neighbours(network[0], images, extractor.preprocessing, device, picture, recipe.seed, workers)
    except BadInput as error:  # an image that nothing but the picture needs
        print_line(f"the picture of neighbours was not drawn: {error}")
    return result


def starting_network(run: Run, options: FinetuneOptions) -> nn.Module:
    """Returns the run's backbone, or one with random weights."""
    if options.random_weights:
        return initial_backbone(replace(run.recipe, seed=options.seed)).float()
    return run.backbone().float()


def labelled_classes_only(data: Dataset) -> Dataset:
    """Renumbers the labels so that every class has a labelled image; refuses data with fewer than two."""
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
    data.check_every_class_labelled()
    number = torch.full((len(data.label_names) + 1,), UNKNOWN)  # the last is for UNKNOWN, which is -1
    number[present] = torch.arange(len(present))
    return replace(data, label_names=names, train=replace(train, label=number[train.label]))


def tune_in_rounds(
    run: Run,
    data: Dataset,
    held_out: EvaluationSet | None,
    options: FinetuneOptions,
    extractor: FeatureExtractor,
    print_line: Callable[[str], None],
) -> tuple[nn.Sequential, dict[str, Any], Float[Tensor, "n c"] | None]:
    """Fine-tunes the extractor's network; the truth is used for the reported accuracies only.

    Returns the classifier, the content of its classifier.json, and its scores of the held-out images.
    """
    width, classes = feature_width(extractor.backbone, run.recipe.backbone, run.recipe.size), len(data.label_names)
    train, seed, settings = data.train, options.seed, options.schedule
    if options.tune == "auto":
        selection = select_mode(extractor, train, width, classes, seed, settings)
        mode, chosen = selection.mode, selection.report()
        print_line(selection.reason)
    else:
        mode, chosen = options.tune, None
    network = make_classifier(extractor, width, classes, seed, mode)
    rounds, scores = [], None
    for done in fine_tune_in_rounds(
        network, train, extractor, seed, rounds=options.rounds, mode=mode, settings=settings
    ):
        accuracy = None
        if held_out is not None:
            scores = predict_scores(network, held_out.split, extractor)
            accuracy = held_out.accuracy(scores).percent
        rounds.append(_round_report(done, data, accuracy))
        print_line(_describe_round(rounds[-1]))
    if len(rounds) < options.rounds:
        left = len(data.train) - len(data.train.labelled)
        reason = (
            f"no prediction of {left} others has a confidence of {CONFIDENCE_THRESHOLD:g} or more"
            if left
            else "all training images are labelled"
        )
        print_line(f"{reason}, so there is no round {len(rounds) + 1}")
    about = {
        "classes": list(data.label_names),
        "tune": mode,
        "chosen": chosen,
        "head": LINEAR if mode == "linear" else HEAD,
        "features": width,
        "random weights": options.random_weights,
        "seed": options.seed,
        "size": extractor.size,
        **extractor.protocol(),
        "confident from": CONFIDENCE_THRESHOLD,
        "rounds": rounds,
    }
    return network, about, scores


def _write_test_figures(
    draft: RunFolder, data: Dataset, held_out: EvaluationSet, about: dict[str, Any], scores: Float[Tensor, "n c"]
) -> dict[str, Any]:
    """Writes confusion and calibration of the held-out images; returns their figures and the protocol."""
    protocol = {
        "tuned": about["tune"],
        "transform": about["transform"],
        "preprocessing": about["preprocessing"],
        "train images": len(data.train),
        "labelled": len(data.train.labelled),
        "test images": len(held_out.split),
        "classes": len(data.label_names),
        "test split": data.test_origin,
    }
    calibrated = calibration(scores, held_out.truth)
    counts = confusion(scores.argmax(1), held_out.truth, len(data.label_names))
    draft.save_confusion(counts, data.label_names)
    draw_confusion(counts, data.label_names, draft.confusion_picture)
    draw_reliability(calibrated, draft.calibration_picture)
    return Result({CLASSIFIER: held_out.accuracy(scores)}, protocol).report() | {"calibration": calibrated.report()}


def _round_report(done: Round, data: Dataset, test_accuracy: float | None) -> dict[str, Any]:
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


def _describe_round(report: dict[str, Any]) -> str:
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
