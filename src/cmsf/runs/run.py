"""A run on the disk: its network, its images, and evaluations of what it learned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from cmsf.analysis.label_issues import THRESHOLD, Suspect, find_label_issues
from cmsf.data import DataConfig, Dataset, load_dataset, open_source
from cmsf.data.labels import Labels
from cmsf.data.loader import worker_count
from cmsf.data.prepare import inference_split
from cmsf.data.sources.table import read_label_list
from cmsf.data.transforms import Preprocessing
from cmsf.evaluation.features import LAYER, FeatureExtractor
from cmsf.evaluation.few_labels import LabelSubset, evaluate_few_labels, seeded_subsets, subset_from_list
from cmsf.evaluation.knn import evaluate_knn, evaluate_pixels, evaluate_retrieval
from cmsf.evaluation.linear import evaluate_linear
from cmsf.evaluation.linear_sgd import evaluate_linear_sgd
from cmsf.evaluation.metrics import Result
from cmsf.evaluation.predict import predict_scores
from cmsf.evaluation.splits import EvaluationSet
from cmsf.evaluation.transfer import TRIALS, evaluate_transfer, make_tuner, paper_suite, read_suite
from cmsf.method.build import initial_backbone, pretrained_weights
from cmsf.recipes.recipe import AUTO, Recipe, ResolvedRecipe
from cmsf.runs.embeddings import EmbeddingFile, Embeddings, NamedSplit, embed, embed_to_file
from cmsf.runs.environment import describe_machine
from cmsf.runs.folder import RunFolder
from cmsf.runs.requests import CLASSIFIER, EMBEDDING_SUFFIXES, TRANSFER, check_metric
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput
from cmsf.utils.files import check_out, expand_user, file_sha256
from cmsf.utils.screen import Screen

_EVALUATIONS: dict[str, Callable[[FeatureExtractor, Dataset], Result]] = {
    "knn": evaluate_knn,
    "linear": evaluate_linear,
    "linear-sgd": evaluate_linear_sgd,
    "retrieval": evaluate_retrieval,
}
Data = str | Path | None
"""A source of images, or a list of labels; None for the run's own."""
Options = dict[str, Any]
"""Keyword arguments of one kind of evaluation."""


class Run:
    """A finished or unfinished run on the disk."""

    def __init__(self, path: str | Path) -> None:
        self.folder = RunFolder(expand_user(path))
        self.recipe = self.folder.recipe()
        self._images: dict[tuple[str, str], Dataset] | None = None

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def preprocessing(self) -> Preprocessing:
        """What is done to images before the network sees them, as `clean_view` takes it."""
        return Preprocessing.from_recipe(self.recipe)

    def backbone(self, device: torch.device | str = "cpu") -> nn.Module:
        """Returns the trained network in eval mode: images in, pooled features out."""
        return self.folder.load_backbone(device)

    def data_config(self, data: Data = None, labels: Data = None) -> DataConfig:
        """Returns the run's own data and labels, or those that are given instead."""
        if data is not None:
            return DataConfig.resolve(data, labels)
        data_config = self.folder.data_config()
        if data_config.runs_command:  # the folder may be somebody else's
            raise BadInput(
                f"the data of {self.path} is a shell command, {data_config.data}; to run it, give it with --data"
            )
        if missing := data_config.missing_download():
            raise BadInput(
                f"{missing}, the data of {self.path}, is not on this machine; to fetch it, give it with --data"
            )
        return data_config if labels is None else replace(data_config, labels=DataConfig.resolve(None, labels).labels)

    def _recorded_request(self, data: Data) -> DataConfig:
        """Returns the origin of the images, without the checks of `data_config`."""
        return self.folder.data_config() if data is None else DataConfig.resolve(data)

    def recipe_for(self, data: Data = None, labels: Data = None) -> ResolvedRecipe:
        """Returns the run's recipe; labels of other images, or of a list, are taken as they are."""
        if data is None and labels is None:
            return self.recipe
        return replace(self.recipe, label_share=1.0, labels_per_class=0, label_noise=0.0, coarse_labels="none")

    def data(self, data: Data = None, labels: Data = None) -> Dataset:
        """Returns the images of the run, which must not have changed since, or others.

        labels: a list of labels that replaces their own.
        """
        if self._images is None:
            return self._load(data, labels)
        key = str(data), str(labels)
        if key not in self._images:
            self._images[key] = self._load(data, labels)
        return self._images[key]

    def _load(self, data: Data, labels: Data) -> Dataset:
        data_config, recipe = self.data_config(data, labels), self.recipe_for(data, labels)
        if data is not None:
            dataset_recipe = Recipe(**asdict(recipe))
            if dataset_recipe.cache == "ram":  # what fits in memory is decided anew, for they may be many more
                dataset_recipe = replace(dataset_recipe, cache=AUTO)
            names = None if data_config.labels is None else Path(data_config.labels)
            return load_dataset(open_source(data), dataset_recipe, self.recipe.size, labels=names)
        images = self.folder.load_images(open_source(data_config.data), data_config, recipe, self.recipe.size)
        if labels is None:
            self.folder.check_same_images(images)
        else:
            self.folder.check_same_paths(images)
        return images

    @contextmanager
    def images_kept(self) -> Iterator[None]:
        """Lets several evaluations in a row load the images once."""
        self._images = {}
        try:
            yield
        finally:
            self._images = None

    def evaluate(
        self, metric: str = "knn", data: Data = None, device: str = "auto", workers: int | None = None, **options: Any
    ) -> dict[str, float]:
        """Returns per cent by name, e.g. {"1-nn": 81.2, "20-nn": 83.0, …}; results/ has intervals and protocol.

        metric: knn; linear, a layer on frozen features fitted to convergence; linear-sgd, the paper's; retrieval, R@1,
            5 and 10; few-labels, with 1 % and 10 % of the labels, or with `lists`; transfer, to the data sets of a
            `suite` (a YAML file; by default those of the paper's ten that are there), with so many `trials`, in
            Optuna's `storage` (a URL; by default a journal in the run folder) or on Ray (`ray=True`); classifier, the
            one that a run of xent or fixmatch, or a fine-tuned one, has.
        """
        return dict(self.evaluation(metric, data, device, workers, **options)["figures"])

    def evaluation(
        self, metric: str = "knn", data: Data = None, device: str = "auto", workers: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Evaluates as `evaluate` does; returns the whole record that it writes to results/."""
        check_metric(metric, data)
        torch_device = pick_device(device)
        result = self._evaluate(metric, self.backbone(torch_device), data, torch_device, worker_count(workers), options)
        about = {"weights_sha256": file_sha256(self.folder.backbone_file)}
        return self._save(metric, result, data, torch_device, about, options)

    def references(
        self, metric: str = "knn", data: Data = None, device: str = "auto", workers: int | None = None, **options: Any
    ) -> dict[str, dict[str, float]]:
        """Returns the same of the network before training and, for knn, of raw pixels: what learning has to beat."""
        records = self.reference_evaluations(metric, data, device, workers, **options)
        return {name: record["figures"] for name, record in records.items()}

    def reference_evaluations(
        self, metric: str = "knn", data: Data = None, device: str = "auto", workers: int | None = None, **options: Any
    ) -> dict[str, dict[str, Any]]:
        """Returns the records of the references, by name."""
        check_metric(metric, data)
        if metric == CLASSIFIER:  # before training there is none
            return {}
        torch_device = pick_device(device)
        start = pretrained_weights(self.recipe)
        if start is not None:
            self.folder.check_same_start(start)
        before = initial_backbone(self.recipe, start).to(torch_device)
        results: dict[str, Result] = {}
        if metric == "knn":
            results["raw pixels"] = evaluate_pixels(self.data(data), self.preprocessing, worker_count(workers))
        name = "untrained encoder" if start is None else "starting weights"
        results[name] = self._evaluate(metric, before, data, torch_device, worker_count(workers), options)
        return {
            name: self._save(metric, result, data, torch_device, {"of": name}, options)
            for name, result in results.items()
        }

    def result_file(self, metric: str = "knn", data: Data = None, of: str = "", **options: Any) -> Path:
        """Returns where an evaluation is written: results/knn.json; for other data, lists or a suite with their names
        and a hash of their full paths."""
        sources = _named_sources(metric, data, options)
        full = [DataConfig.resolve(source).data for source in sources]
        mark = [sha256("\n".join(full).encode()).hexdigest()[:8]] if full else []
        return self._result_path(metric, *map(_stem, sources), *mark, of)

    def _result_path(self, *names: str) -> Path:
        return self.folder.results / f"{'-'.join(name.replace(' ', '-') for name in names if name)}.json"

    def result(self, metric: str = "knn", data: Data = None, of: str = "", **options: Any) -> dict[str, Any]:
        """Returns the record of an evaluation that was written last: figures, measures with intervals, protocol."""
        file = self.result_file(metric, data, of, **options)
        old = self._result_path(metric, *map(_stem, _named_sources(metric, data, options)), of)
        existing = file if file.exists() or not old.exists() else old  # the name without a hash, as it once was
        record: dict[str, Any] = json.loads(existing.read_text(encoding="utf-8"))
        if existing != file and data is not None and record.get("data") != DataConfig.resolve(data).data:
            raise FileNotFoundError(f"{file} does not exist, and {old} is of {record.get('data')}")
        return record

    def _evaluate(
        self, metric: str, backbone: nn.Module, data: Data, device: torch.device, workers: int, options: Options
    ) -> Result:
        features = self._features(backbone, device, workers)
        if metric == TRANSFER:
            return self._transfer(features, workers, **options)
        if metric == "few-labels":
            return self._few_labels(features, data, **options)
        if metric == CLASSIFIER:
            return self._classifier(features, data)
        return _EVALUATIONS[metric](features, self.data(data), **options)

    def _features(self, backbone: nn.Module, device: torch.device, workers: int) -> FeatureExtractor:
        return FeatureExtractor(backbone, self.preprocessing, device, workers, self.folder.features)

    def _classifier(self, extractor: FeatureExtractor, data: Data) -> Result:
        images, names = self.data(data), self.folder.classifier()["classes"]
        held_out = EvaluationSet.of(images, names)
        if held_out is None:
            raise BadInput(f"no test image of {images.name} has a class that {self.path} knows, such as {names[0]!r}")
        scores = predict_scores(self.folder.load_classifier(extractor.device), held_out.split, extractor)
        protocol = {"test images": len(held_out.split), "classes": len(names), "test split": images.test_origin}
        return Result({CLASSIFIER: held_out.accuracy(scores)}, extractor.protocol() | protocol)

    def _few_labels(self, features: FeatureExtractor, data: Data, lists: Sequence[str | Path] = ()) -> Result:
        images, seed = self.data(data), self.recipe.seed
        subsets = [self._listed_subset(Path(file), data) for file in lists] or seeded_subsets(images, seed)
        return evaluate_few_labels(features, images, subsets, seed)

    def _listed_subset(self, file: Path, data: Data) -> LabelSubset:
        """Returns the training images that a list names, with the labels it gives them."""
        source = open_source(self._recorded_request(data).data)
        names = read_label_list(source, expand_user(file))["train"]
        return subset_from_list(file, dict(zip(source.train.images.paths, names, strict=True)), self.data(data))

    def _transfer(
        self,
        features: FeatureExtractor,
        workers: int,
        suite: str | Path | None = None,
        trials: int = TRIALS,
        storage: str | None = None,
        ray: bool = False,
    ) -> Result:
        log = Screen().print
        sets = paper_suite(log) if suite is None else read_suite(expand_user(suite))
        folder, seed = self.folder.results / "transfer", self.recipe.seed
        tuner = make_tuner(folder, trials=trials, processes=max(1, workers), seed=seed, storage=storage, ray=ray)
        result = evaluate_transfer(features, sets, tuner, seed, trials, log)
        searcher = "Ray Tune, OptunaSearch, ASHA" if ray else "Optuna, TPE, successive halving"
        searched = {"searched with": f"{searcher}, in {max(1, workers)} processes"}
        return replace(result, protocol=result.protocol | searched)

    def suspects(
        self,
        data: Data = None,
        labels: Data = None,
        least: float = THRESHOLD,
        device: str = "auto",
        workers: int | None = None,
    ) -> list[Suspect]:
        """Returns training images whose labels, those of the run or of a list, their neighbours doubt; the worst first.

        least: the lowest score that makes a suspect, from 0 (all of them) to 1.
        """
        torch_device = pick_device(device)
        images = self.data(data, labels)
        extractor = self._features(self.backbone(torch_device), torch_device, worker_count(workers))
        return find_label_issues(extractor, images, least)

    @overload
    def embed(
        self, data: Data = None, out: None = None, device: str = "auto", workers: int | None = None
    ) -> Embeddings: ...

    @overload
    def embed(
        self, data: Data = None, *, out: str | Path, device: str = "auto", workers: int | None = None
    ) -> Path: ...

    def embed(
        self, data: Data = None, out: str | Path | None = None, device: str = "auto", workers: int | None = None
    ) -> Embeddings | Path:
        """Returns the L2-normalised features that evaluations rest on, of the run's own images or of a whole source.

        Images that cannot be read are left out. out: a .npz or .parquet to write them to, whose path is returned.
        """
        if out is not None:
            return self.embed_to_file(out, data, device, workers).path
        return embed(self._extractor(device, workers), self._named_splits(data))

    def embed_to_file(
        self, out: str | Path, data: Data = None, device: str = "auto", workers: int | None = None
    ) -> EmbeddingFile:
        """Writes what `embed` returns; after an interruption, the same call goes on."""
        file = check_out(out, *EMBEDDING_SUFFIXES)
        extractor, splits = self._extractor(device, workers), self._named_splits(data)
        views = extractor.protocol(*(part.split for part in splits))
        about = {
            "run": str(self.path.absolute()),
            "weights_sha256": file_sha256(self.folder.backbone_file),
            "data": self._recorded_request(data).data,
            "layer": LAYER,
            "transform": views["transform"],
            "preprocessing": views["preprocessing"],
            "cmsf": version("cmsf"),
        }
        return embed_to_file(file, extractor, splits, about)

    def _extractor(self, device: str, workers: int | None) -> FeatureExtractor:
        torch_device = pick_device(device)
        return FeatureExtractor(self.backbone(torch_device), self.preprocessing, torch_device, worker_count(workers))

    def _named_splits(self, data: Data) -> list[NamedSplit]:
        """Returns the run's own splits with the true classes, as evaluations have them, or those of a source."""
        if data is not None:
            return self.source_splits(data)
        images = self.data()
        return [
            NamedSplit(name, split, Labels(split.truth, images.classes).to_names()) for name, split in images.splits()
        ]

    def source_splits(self, data: Data) -> list[NamedSplit]:
        """Returns the splits of a source in the order train, val, test, to be read as this run reads its images."""
        source = open_source(data)
        for note in source.notes:
            Screen().print(note)
        size = self.recipe.size if self.recipe.cache == "ram" else None
        return [NamedSplit(name, inference_split(split, size), split.names) for name, split in source.ordered_splits()]

    def _save(
        self, metric: str, result: Result, data: Data, device: torch.device, about: dict[str, str], options: Options
    ) -> dict[str, Any]:
        record = result_header(metric, self._recorded_request(data), self.recipe, about, device) | result.report()
        self.folder.save_result(self.result_file(metric, data, about.get("of", ""), **options), record)
        return record


def result_header(
    metric: str, data_config: DataConfig, recipe: Recipe, about: dict[str, str], device: torch.device
) -> dict[str, Any]:
    """Returns what a result holds beside its figures and protocol."""
    # The sets of a transfer are in its protocol.
    sources = {} if metric == TRANSFER else {"data": data_config.data, "val": data_config.val}
    written = datetime.now(UTC).isoformat(timespec="seconds")
    header = {"metric": metric, **sources, "recipe": recipe.name, **about, "written": written}
    return header | describe_machine(str(device))


def _named_sources(metric: str, data: Data, options: Options) -> list[str | Path]:
    """Returns what an evaluation was given beside the run's own images."""
    sources = [] if data is None or metric == TRANSFER else [data]
    return [*sources, *options.get("lists", ()), *filter(None, [options.get("suite")])]


def _stem(source: str | Path) -> str:
    return re.sub(r"[^\w.-]+", "-", expand_user(source).absolute().stem)
