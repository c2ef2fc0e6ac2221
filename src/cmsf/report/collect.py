"""From a run on the disk to what stands on the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cmsf.analysis.collapse import Variety
from cmsf.analysis.figures.gallery import one_a_class_in_turn
from cmsf.analysis.neighbor_graph import graph_of
from cmsf.analysis.neighbourhood import HISTOGRAM_TO, histogram, inspect, median_rank, rank_of_last
from cmsf.analysis.uniformity import alignment, uniformity
from cmsf.data import Dataset, load_batches
from cmsf.data.loader import worker_count
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.features import BATCH, in_eval_mode, unit_features
from cmsf.method.constraints import NearCompanion
from cmsf.method.learner import Learner
from cmsf.method.losses import FIRST
from cmsf.report import written
from cmsf.report.classes import judge
from cmsf.report.contents import Figure, RunReport
from cmsf.report.cost import cost
from cmsf.report.galleries import known_rows, of_bank, of_test_images
from cmsf.report.image_pool import Album, Everything
from cmsf.report.plots import RELATED, Drawing, bars, binned, drawings, maps
from cmsf.runs.cost import Spent, spent
from cmsf.runs.log import epoch_lines, is_plain_number
from cmsf.runs.run import Run
from cmsf.training.checkpointer import last_learner
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput
from cmsf.utils.rng import permutation
from cmsf.utils.text import escape_unprintable

_SAMPLED = 5_000
"""Images that the spread of all is judged by."""
_SAMPLING = 0x5A3B << 40  # what this use of the hash is for; no epoch is ever so high
_NEIGHBOURS = 20
_SIZES, _QUERIES = (5, 10, 20, 50, 100), 1_000
"""Of C, that the ranks are looked at for, and by how many rows of the bank."""


@dataclass(frozen=True)
class Machine:
    """Where it is computed, and who is told of it."""

    device: str
    workers: int | None
    say: Callable[[str], None]


@dataclass(frozen=True)
class Gathered:
    """A run, ready for the page, and its plots, ready for files; with what it is compared with others by.

    spent: None where that cannot be said.
    """

    report: RunReport
    drawings: tuple[Drawing, ...]
    epochs: tuple[Mapping[str, Any], ...]
    spent: Spent | None


def gather_history(run: Run, number: int = 0) -> Gathered:
    """What is known without looking at an image: of a run that is being trained, or has just begun."""
    epochs = _epochs(run)
    drawn = tuple(drawings(epochs))
    tables, notes = written.results(run.folder)
    bill = None
    try:
        bill = spent(run.folder) if epochs else None
    except BadInput as error:
        notes = (*notes, f"what it has cost cannot be said: {error}")
    report = RunReport(
        name=run.recipe.name,
        path=str(run.path),
        state=_state(run, len(epochs)),
        summary=(*_images(run, bill), *_summary(epochs)),
        plots=tuple(drawing.on_page(number) for drawing in drawn),
        results=tables,
        compute=() if bill is None else cost(bill),
        recipe=written.settings(run.recipe),
        environment=written.environment(run.folder),
        notes=notes,
    )
    return Gathered(report, drawn, tuple(epochs), bill)


def gather(run: Run, machine: Machine, most: int, number: int = 0) -> Gathered:
    """All that can be said of a run: its images are looked at by its network, and its bank by its own constraint.

    most: so many images may be on the page; number: which run of the page it is.
    """
    known = gather_history(run, number)
    if not run.folder.backbone_file.exists():
        return _with_note(
            known, f"it is not trained to its end, so there is no network yet: cmsf train --resume {run.path} goes on"
        )
    try:
        data = run.data()
    except BadInput as error:
        return _with_note(known, f"its images cannot be looked at: {error}")
    seed, features = run.recipe.seed, _extractor(run, machine)
    everything = _look_at(data, features)
    album = Album(everything, most)
    galleries, drawn = [of_test_images(album, seed)], list(known.drawings)
    learner, notes = None, list(known.report.notes)
    try:
        if known.epochs:  # else it was fine-tuned, and has no bank
            learner = last_learner(run.folder, run.recipe, data, torch.device("cpu"), machine.say)
    except BadInput as error:
        notes.append(f"its bank cannot be looked at: {error}")
    figures = [*known.report.summary, *_on_the_sphere(everything, seed)]
    if learner is not None:
        galleries += of_bank(album, learner, seed)
        drawn += _ranks_by_size(learner, seed)
        figures += [*_of_two_views(learner, data, features, seed), *_in_last_learner(learner, data, seed)]
    judged = judge(album)
    drawn += [judged.confusion] if judged.confusion is not None else []
    album.add_around(one_a_class_in_turn(data.train, seed).tolist())
    pool = album.pool()
    report = replace(
        known.report,
        classes=judged.classes,
        pairs=judged.pairs,
        suspects=judged.suspects,
        about_suspects=judged.about_suspects,
        notes=(*notes, *judged.notes),
        summary=tuple(figures),
        plots=tuple(drawing.on_page(number) for drawing in drawn),
        images=pool,
        galleries=tuple(galleries),
    )
    return replace(known, report=report, drawings=(*drawn, *maps(pool)))


def _extractor(run: Run, machine: Machine) -> FeatureExtractor:
    device, workers = pick_device(machine.device), worker_count(machine.workers)
    return FeatureExtractor(run.backbone(device), run.recipe.size, device, workers, run.folder.features)


def _look_at(data: Dataset, features: FeatureExtractor) -> Everything:
    train = features(data.train)
    test = None if data.test is None else features(data.test)
    graph = graph_of(train, test, _NEIGHBOURS)
    return Everything(data, train if test is None else torch.cat([train, test]), graph.row, graph.similarity)


def _ranks_by_size(learner: Learner, seed: int) -> list[Drawing]:
    """The ablation of k′: the histogram of ranks that the same bank has with others (right half of that table)."""
    watched, bank, query = learner.objective.watched, learner.bank, known_rows(learner.bank.rows(), seed, _QUERIES)
    if watched is None or watched.k is None or not isinstance(watched.constraint, NearCompanion):
        return []
    shares = {}
    for size in _SIZES:
        if watched.k <= size <= len(query):
            constraint = NearCompanion(size)
            row = bank.find(query, constraint, watched.k, watched.include_query).row
            assert row is not None
            shares[f"k′ = {size}"] = binned(histogram(rank_of_last(query, bank, row)), len(query))
    if not shares:
        return []
    caption = (
        f"Of {len(query)} queries of the last bank, the share whose neighbour number {watched.k} in C is in each bin "
        f"of five ranks in M, for several sizes of C; farther ones than {HISTOGRAM_TO} are not shown."
    )
    figure = bars(shares, "rank in M", "share of the queries")
    return [Drawing(RELATED, "rank-by-size", "Ranks by the size of C", caption, figure)]


def _in_last_learner(learner: Learner, data: Dataset, seed: int) -> list[Figure]:
    """Purity as the figure of that name has it, of the rows of the newest checkpoint."""
    watched, bank, query = learner.objective.watched, learner.bank, known_rows(learner.bank.rows(), seed, _QUERIES)
    if watched is None or not learner.objective.chooses or not len(query):
        return []
    chosen = bank.find(query, watched.constraint, watched.k, watched.include_query)
    seen = inspect(query, bank, watched.constraint, chosen, data.train.truth, watched.include_query)
    shares = [100 * float(purity.nanmean()) for purity in (seen.constrained, seen.unconstrained, seen.as_far)]
    if any(map(math.isnan, shares)):
        return []
    note = (
        f"of C; {shares[1]:.0f} % of as many of M; {shares[2]:.0f} % as far out in M, to rank {median_rank(seen.rank)}"
    )
    return [Figure("purity of the last bank", f"{shares[0]:.0f} %", note)]


def _of_two_views(learner: Learner, data: Dataset, features: FeatureExtractor, seed: int) -> list[Figure]:
    """Alignment: how far apart two views of an image are."""
    view = learner.views[FIRST]
    some = data.train.subset(permutation(len(data.train), seed, _SAMPLING)[:_QUERIES])
    everyone = torch.arange(len(some)).split(BATCH)
    looks = []
    with in_eval_mode(features.backbone):
        for epoch in (0, 1):
            plan = ((epoch, index) for index in everyone)
            batches = load_batches(
                some, plan, {FIRST: view.crop}, seed=seed, device=features.device, workers=features.workers
            )
            looks.append(torch.cat([unit_features(features.backbone, view(batch, FIRST)) for batch in batches]))
    apart = alignment(*looks)
    return [Figure("alignment", f"{apart:.2f}", "squared distance of two views; 0 where views do not matter")]


def _on_the_sphere(everything: Everything, seed: int) -> list[Figure]:
    """How the features of the training images lie there."""
    train = everything.features[: len(everything.data.train)]
    some = train[permutation(len(train), seed, _SAMPLING)[:_SAMPLED]]
    variety = Variety.of(some)
    return [
        Figure("spread of features", f"{variety.spread:.2f}", "0 is a collapse, 1 all over the sphere"),
        Figure("effective rank of features", f"{variety.effective_rank:.1f}", f"of {train.shape[1]} directions"),
        Figure("uniformity", f"{uniformity(some):.2f}", "0 is one point; lower is more even"),
    ]


def _state(run: Run, epochs: int) -> str:
    if run.folder.complete():
        return "complete"
    so_far = f"epoch {epochs} of {run.recipe.epochs}"
    return so_far if run.folder.in_training() else f"stopped after {so_far}"


def _images(run: Run, bill: Spent | None) -> list[Figure]:
    if bill is None:
        return []
    source = run.folder.request().data
    named = "" if source is None else f" of {Path(source).name or source}"
    known = f"; {bill.classes} classes" if bill.classes else ""
    return [
        Figure("training images", f"{bill.images:,}", f"{named}, and {bill.test_images:,} to test{known}".strip(" ,"))
    ]


def _epochs(run: Run) -> list[dict[str, Any]]:
    if not run.folder.metrics_file.exists():
        return []
    epochs = list(epoch_lines(run.folder.metrics_file))
    if not all(type(line.get("epoch")) is int and 0 <= line["epoch"] < run.recipe.epochs for line in epochs):
        raise BadInput(f"{run.folder.metrics_file} has epochs that are not those of its recipe")
    return [_plausible(line) for line in epochs]


def _plausible(line: dict[str, Any]) -> dict[str, Any]:
    """What of a line can be drawn: somebody else may have written it."""
    counts = line.pop("rank_histogram", None)
    kept = {escape_unprintable(name): value for name, value in line.items() if is_plain_number(value)}
    if isinstance(counts, list) and all(type(count) is int and 0 <= count < 2**53 for count in counts):
        kept["rank_histogram"] = counts[:HISTOGRAM_TO]
    return kept


def _summary(epochs: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """What the last epoch that was judged, and the last one, say."""
    figures = []
    judged = [line for line in epochs if isinstance(line.get("20-nn"), float)]
    if judged:
        first, last = judged[0], judged[-1]
        before = f"; {first['20-nn']:.2f} % after epoch {first['epoch'] + 1}" if len(judged) > 1 else ""
        figures.append(Figure("20-NN", f"{last['20-nn']:.2f} %", f"after epoch {last['epoch'] + 1}{before}"))
    for line in epochs[-1:]:
        if isinstance(line.get("loss"), float):
            figures.append(Figure("loss", f"{line['loss']:.3f}", f"mean of epoch {line['epoch'] + 1}"))
        constrained, plain = line.get("purity_constrained"), line.get("purity_unconstrained")
        if isinstance(constrained, float) and isinstance(plain, float):
            figures.append(
                Figure("purity", f"{100 * constrained:.0f} %", f"of C's neighbours; M's own {100 * plain:.0f} %")
            )
        if isinstance(line.get("rank_median"), float):
            figures.append(Figure("median rank", f"{line['rank_median']:.0f}", "in M, of C's last neighbour"))
    return figures


def _with_note(gathered: Gathered, note: str) -> Gathered:
    return replace(gathered, report=replace(gathered.report, notes=(*gathered.report.notes, note)))
