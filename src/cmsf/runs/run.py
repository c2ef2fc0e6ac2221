"""A run on the disk: its network, its images, and how good what it learned is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.analysis.label_issues import THRESHOLD, Suspect, find_label_issues
from cmsf.data import DataRequest, Dataset, Source, build_dataset, load_dataset, open_source
from cmsf.data.loader import worker_count
from cmsf.evaluation import (
    FeatureExtractor,
    LabelSubset,
    Result,
    evaluate_few_labels,
    evaluate_knn,
    evaluate_linear,
    evaluate_linear_sgd,
    evaluate_pixels,
    evaluate_retrieval,
    seeded_subsets,
    subset_from_list,
)
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.evaluation.transfer import TRIALS, evaluate_transfer, make_search, paper_suite, read_suite
from cmsf.method.build import initial_backbone, pretrained_weights
from cmsf.recipes.recipe import AUTO, Recipe, Resolved
from cmsf.runs.classifier_folder import ClassifierFolder
from cmsf.runs.environment import describe_machine
from cmsf.runs.folder import RunFolder
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput, did_you_mean
from cmsf.utils.files import expand_user, file_sha256
from cmsf.utils.screen import Screen

_PLAIN: dict[str, Callable[[FeatureExtractor, Dataset], Result]] = {
    "knn": evaluate_knn,
    "linear": evaluate_linear,
    "linear-sgd": evaluate_linear_sgd,
    "retrieval": evaluate_retrieval,
}
TRANSFER, CLASSIFIER = "transfer", "classifier"
METRICS = (*_PLAIN, "few-labels", TRANSFER, CLASSIFIER)


class Run:
    """A finished or unfinished run on the disk."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder(expand_user(path))
        self.recipe = self.folder.recipe()
        self._kept: dict[tuple[str, str | None], Dataset] | None = None

    @property
    def path(self) -> Path:
        return self.folder.path

    def backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """The trained network in eval mode: images in, pooled features out."""
        return self.folder.load_backbone(device)

    def request(self, data: str | Path | None = None, labels: str | Path | None = None) -> DataRequest:
        """The run's own images unless others are named, and their labels unless a list is."""
        if data is not None:
            return DataRequest.of(data, labels)
        request = self.folder.request()
        if request.runs_command:  # the folder may be somebody else's
            raise BadInput(
                f"the data of {self.path} is a shell command, {request.data}; to run it, give it with --data"
            )
        if missing := request.missing_download():
            raise BadInput(
                f"{missing}, the data of {self.path}, is not on this machine; to fetch it, give it with --data"
            )
        return request if labels is None else replace(request, labels=DataRequest.of(None, labels).labels)

    def recipe_for(self, data: str | Path | None = None, labels: str | Path | None = None) -> Resolved:
        """The run's recipe; labels of other images, or of a list, are taken as they are."""
        if data is None and labels is None:
            return self.recipe
        return replace(self.recipe, label_share=1.0, labels_per_class=0, label_noise=0.0, coarse_labels="none")

    def data(self, data: str | Path | None = None) -> Dataset:
        """The images of the run, which must not have changed since, or others; as the run sees them."""
        return self._once((str(data), None), lambda: self._load(data))

    def _once(self, key: tuple[str, str | None], load_dataset: Callable[[], Dataset]) -> Dataset:
        if self._kept is None:
            return load_dataset()
        if key not in self._kept:
            self._kept[key] = load_dataset()
        return self._kept[key]

    @contextmanager
    def images_kept(self) -> Iterator[None]:
        """Several evaluations in a row load the images once."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def evaluate(
        self,
        metric: str = "knn",
        data: str | Path | None = None,
        device: str = "auto",
        workers: int | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Per cent by name, e.g. {"1-nn": 81.2, "20-nn": 83.0, …}; written with intervals and protocol to results/.

        metric: knn; linear, a layer on frozen features fitted to convergence; linear-sgd, the paper's; retrieval, R@1,
            5 and 10; few-labels, with 1 % and 10 % of the labels, or with `lists`; transfer, to the data sets of a
            `suite` (a YAML file; by default those of the paper's ten that are there), with so many `trials`, in
            Optuna's `storage` (a URL; by default a journal in the run folder) or on Ray (`ray=True`); classifier, the
            one that a run of xent or fixmatch, or a fine-tuned one, has.
        """
        check_metric(metric)
        where = pick_device(device)
        result = self._judge(metric, self.backbone(where), data, where, worker_count(workers), options)
        self._save(metric, result, data, where, {"weights_sha256": file_sha256(self.folder.backbone_file)}, options)
        return result.accuracy

    def references(
        self,
        metric: str = "knn",
        data: str | Path | None = None,
        device: str = "auto",
        workers: int | None = None,
        **options: Any,
    ) -> dict[str, dict[str, float]]:
        """The same of the network before training and, for knn, of raw pixels: what learning has to beat."""
        check_metric(metric)
        if metric == CLASSIFIER:  # before training there is none
            return {}
        where = pick_device(device)
        start = pretrained_weights(self.recipe)
        if start is not None:
            self.folder.check_same_start(start)
        before = initial_backbone(self.recipe, start).to(where)
        called = "untrained encoder" if start is None else "starting weights"
        results: dict[str, Result] = {}
        if metric == "knn":
            results["raw pixels"] = evaluate_pixels(self.data(data), self.recipe.size, worker_count(workers))
        results[called] = self._judge(metric, before, data, where, worker_count(workers), options)
        for name, result in results.items():
            self._save(metric, result, data, where, {"of": name}, options)
        return {name: result.accuracy for name, result in results.items()}

    def result_file(self, metric: str = "knn", data: str | Path | None = None, of: str = "", **options: Any) -> Path:
        """Where an evaluation is written: results/knn.json, with the names of other data, lists or a suite added."""
        given = [] if data is None or metric == TRANSFER else [data]
        given += [*options.get("lists", ()), *filter(None, [options.get("suite")])]
        others = [re.sub(r"[^\w.-]+", "-", expand_user(one).absolute().stem) for one in given]
        names = filter(None, [metric, *others, of.replace(" ", "-")])
        return self.folder.results / f"{'-'.join(names)}.json"

    def result(
        self, metric: str = "knn", data: str | Path | None = None, of: str = "", **options: Any
    ) -> dict[str, Any]:
        """The evaluation that was written last: figures, measures with their intervals, protocol."""
        found: dict[str, Any] = json.loads(self.result_file(metric, data, of, **options).read_text(encoding="utf-8"))
        return found

    def _judge(
        self,
        metric: str,
        backbone: nn.Module,
        data: str | Path | None,
        device: torch.device,
        workers: int,
        options: dict[str, Any],
    ) -> Result:
        features = FeatureExtractor(backbone, self.recipe.size, device, workers, self.folder.features)
        if metric == TRANSFER:
            return self._transfer(features, workers, **options)
        if metric == "few-labels":
            return self._few_labels(features, data, **options)
        if metric == CLASSIFIER:
            return self._classifier(features, data)
        return _PLAIN[metric](features, self.data(data), **options)

    def _classifier(self, like: FeatureExtractor, data: str | Path | None) -> Result:
        folder, images = ClassifierFolder(self.path), self.data(data)
        names = folder.about()["classes"]
        held_out = EvaluationSet.of(images, names)
        if held_out is None:
            raise BadInput(f"no test image of {images.name} has a class that {self.path} knows, such as {names[0]!r}")
        scores = predict_scores(folder.load_network(like.device), held_out.split, like)
        protocol = {"transform": like.transform, "test images": len(held_out.split), "classes": len(names)}
        return Result({CLASSIFIER: held_out.accuracy(scores)}, protocol | {"test split": images.test_origin})

    def _few_labels(
        self, features: FeatureExtractor, data: str | Path | None, lists: Sequence[str | Path] = ()
    ) -> Result:
        images, seed = self.data(data), self.recipe.seed
        few = seeded_subsets(images, seed) if not lists else [self._few(Path(file), data) for file in lists]
        return evaluate_few_labels(features, images, few, seed)

    def _few(self, file: Path, data: str | Path | None) -> LabelSubset:
        """The training images that a list names, with the labels it gives them."""
        request = self.folder.request() if data is None else DataRequest.of(data)
        val = None if request.val is None else open_source(request.val)
        arranged = build_dataset(
            open_source(request.data), Recipe(seed=self.recipe.seed), labels=expand_user(file), val=val
        )
        return subset_from_list(file, arranged, self.data(data))

    def _transfer(
        self,
        features: FeatureExtractor,
        workers: int,
        suite: str | Path | None = None,
        trials: int = TRIALS,
        storage: str | None = None,
        ray: bool = False,
    ) -> Result:
        say = Screen().print
        sets = paper_suite(say) if suite is None else read_suite(expand_user(suite))
        folder, seed = self.folder.results / "transfer", self.recipe.seed
        search = make_search(folder, trials=trials, processes=max(1, workers), seed=seed, storage=storage, ray=ray)
        result = evaluate_transfer(features, sets, search, seed, trials, say)
        by = "Ray Tune, OptunaSearch, ASHA" if ray else "Optuna, TPE, successive halving"
        return result.with_protocol({"searched with": f"{by}, in {max(1, workers)} processes"})

    def suspects(
        self,
        data: str | Path | None = None,
        labels: str | Path | None = None,
        least: float = THRESHOLD,
        device: str = "auto",
        workers: int | None = None,
    ) -> list[Suspect]:
        """Training images whose labels, those of the run or of a list, their neighbours doubt; the worst first.

        least: the lowest score that makes a suspect, from 0 (all of them) to 1.
        """
        where = pick_device(device)
        images = self.relabelled(data, labels)
        features = FeatureExtractor(
            self.backbone(where), self.recipe.size, where, worker_count(workers), self.folder.features
        )
        return find_label_issues(features, images, least)

    def relabelled(self, data: str | Path | None, labels: str | Path | None) -> Dataset:
        """The run's images or others, with the labels of a list instead of their own, where one is given."""
        if labels is None:
            return self.data(data)
        return self._once((str(data), str(labels)), lambda: self._relabel(data, labels))

    def _relabel(self, data: str | Path | None, labels: str | Path) -> Dataset:
        request, recipe = self.request(data, labels), self.recipe_for(data, labels)
        if data is not None:
            return load_dataset(open_source(data), recipe, self.recipe.size, labels=Path(request.labels or ""))
        images = load_images(open_source(request.data), request, recipe, self.recipe.size, self.folder)
        self.folder.check_same_paths(images)
        return images

    def _load(self, data: str | Path | None) -> Dataset:
        request = self.request(data)
        if data is not None:
            return load_dataset(open_source(data), self.recipe_for(data), self.recipe.size)
        images = load_images(open_source(request.data), request, self.recipe, self.recipe.size, self.folder)
        self.folder.check_same_images(images)
        return images

    def _save(
        self,
        metric: str,
        result: Result,
        data: str | Path | None,
        device: torch.device,
        about: dict[str, str],
        options: dict[str, Any],
    ) -> None:
        request = self.folder.request() if data is None else DataRequest.of(data)
        # The sets of a transfer are in its protocol.
        judged_on = {} if metric == TRANSFER else {"data": request.data, "val": request.val}
        known = {"metric": metric, **judged_on, "recipe": self.recipe.name, **about}
        known |= {"written": datetime.now(UTC).isoformat(timespec="seconds"), **describe_machine(str(device))}
        self.folder.save_result(self.result_file(metric, data, about.get("of", ""), **options), known | result.report())


def load_images(source: Source, request: DataRequest, recipe: Recipe, size: int, folder: RunFolder) -> Dataset:
    """The images of a run; one that exists says what it left out, and how it keeps them."""
    if folder.exists() and recipe.cache == AUTO:
        recipe = replace(recipe, cache=folder.recipe().cache)
    return load_dataset(
        source,
        recipe,
        size,
        labels=None if request.labels is None else Path(request.labels),
        val=None if request.val is None else open_source(request.val),
        known_broken=folder.known_broken(),
        seen=folder.seen() if folder.exists() else None,
    )


def check_metric(metric: str) -> None:
    if metric not in METRICS:
        hint = did_you_mean(metric, METRICS, f"use {', '.join(METRICS)}")
        raise BadInput(f"there is no evaluation {metric!r}; {hint}")
