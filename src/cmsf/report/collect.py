"""Collects what a run's page shows: its history, and what its network, its images and its bank say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from cmsf.analysis.collapse import EmbeddingStats, alignment, uniformity
from cmsf.analysis.figures.classifier import confusion_figure
from cmsf.analysis.figures.gallery import one_a_class_in_turn
from cmsf.analysis.label_issues import THRESHOLD, Suspect, compare_with_truth, find_label_issues
from cmsf.analysis.neighbourhood import HISTOGRAM_TO, histogram, median_rank, neighbourhood_stats, rank_of_last
from cmsf.analysis.per_class import ClassReport, class_report
from cmsf.data import Dataset, load_batches
from cmsf.data.loader import worker_count
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.features import BATCH, eval_mode, unit_features
from cmsf.method.constraints import NearCompanion
from cmsf.method.learner import Learner
from cmsf.method.losses import FIRST
from cmsf.report.contents import RunReport, Stat
from cmsf.report.galleries import bank_galleries, feature_gallery, sample_rows
from cmsf.report.history import collect_history
from cmsf.report.image_pool import EmbeddedImages, PoolBuilder
from cmsf.report.plots import RELATED, Plot, plot_style, rank_histogram
from cmsf.runs.run import Run
from cmsf.training.checkpointer import load_learner
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.device import pick_device
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track
from cmsf.utils.rng import permutation

_SAMPLED = 5_000
"""Images that spread and uniformity are estimated from."""
_SAMPLING = 0x5A3B << 40  # what this use of the hash is for; no epoch is ever so high
_SIZES, _QUERIES = (5, 10, 20, 50, 100), 1_000
"""Sizes of C whose ranks are compared, and by how many rows of the bank."""
_LARGEST_CONFUSION = 60
"""Classes with which a confusion matrix is readable."""
_LISTED, _SUSPECT_SHARE = 300, 4
"""At most so many suspects are shown, and no more than a quarter of the page's images."""


def collect_run(
    run: Run, max_images: int, device: str = "auto", workers: int | None = None, warn: Callable[[str], None] = print
) -> RunReport:
    """Returns the whole report of a run: its network embeds its images, and its bank is searched with its constraint.

    max_images: on the page.
    """
    report = collect_history(run)
    if not run.folder.backbone_file.exists():
        note = f"its training is not complete, so there is no network yet: cmsf train --resume {run.path} resumes it"
        return replace(report, notes=(*report.notes, note))
    try:
        data = run.data()
    except BadInput as error:
        return replace(report, notes=(*report.notes, f"its images cannot be read: {error}"))
    seed, torch_device = run.recipe.seed, pick_device(device)
    extractor = FeatureExtractor(
        run.backbone(torch_device), run.preprocessing, torch_device, worker_count(workers), run.folder.features
    )
    images = EmbeddedImages.with_neighbours(
        data, extractor(data.train), None if data.test is None else extractor(data.test)
    )
    pool = PoolBuilder(images, max_images)
    notes, summary, plots = list(report.notes), [*report.summary, *_feature_stats(images, seed)], list(report.plots)
    galleries, learner = [feature_gallery(pool, seed)], None
    try:
        if report.epochs:  # else it was fine-tuned, and has no bank
            learner = load_learner(run.folder, run.recipe, data, torch.device("cpu"), warn)
    except BadInput as error:
        notes.append(f"its bank cannot be read: {error}")
    if learner is not None:
        galleries += bank_galleries(pool, learner, seed)
        plots += _ranks_by_size(learner, seed)
        summary += [_alignment(learner, data, extractor, seed), *_bank_purity(learner, data, seed)]
    classes, class_notes = collect_classes(images)
    suspects, about_suspects, label_notes = collect_suspects(pool)
    pool.add_with_neighbours(one_a_class_in_turn(data.train, seed).tolist())
    return replace(
        report,
        summary=tuple(summary),
        plots=(*plots, *(_confusion(classes, data.classes) if classes is not None else ())),
        images=pool.build(),
        galleries=tuple(galleries),
        classes=classes,
        suspects=suspects,
        about_suspects=about_suspects,
        notes=(*notes, *class_notes, *label_notes),
    )


def _feature_stats(images: EmbeddedImages, seed: int) -> list[Stat]:
    """Returns how the features of the training images lie on the sphere."""
    sample = images.train[permutation(len(images.train), seed, _SAMPLING)[:_SAMPLED]]
    variety = EmbeddingStats.of(sample)
    return [
        Stat("spread of features", f"{variety.spread:.2f}", "0 is a collapse, 1 all over the sphere"),
        Stat("effective rank of features", f"{variety.effective_rank:.1f}", f"of {sample.shape[1]} directions"),
        Stat("uniformity", f"{uniformity(sample):.2f}", "0 is one point; lower is more even"),
    ]


def _alignment(learner: Learner, data: Dataset, extractor: FeatureExtractor, seed: int) -> Stat:
    """Returns how far apart two views of an image are."""
    view = learner.views[FIRST]
    sample = data.train.subset(permutation(len(data.train), seed, _SAMPLING)[:_QUERIES])
    views = []
    with eval_mode(extractor.backbone):
        for epoch in (0, 1):
            plan = ((epoch, index) for index in torch.arange(len(sample)).split(BATCH))
            batches = load_batches(
                sample, plan, {FIRST: view.crop}, seed=seed, device=extractor.device, workers=extractor.workers
            )
            tracked = track(batches, "alignment of two views", len(sample), BATCH)
            views.append(torch.cat([unit_features(extractor.backbone, view(batch, FIRST)) for batch in tracked]))
    return Stat("alignment", f"{alignment(*views):.2f}", "squared distance of two views; 0 where views do not matter")


def _bank_purity(learner: Learner, data: Dataset, seed: int) -> list[Stat]:
    """Returns purity as in the figure of that name, of the rows of the newest checkpoint."""
    search, bank, query = learner.loss_fn.logged_search, learner.bank, sample_rows(learner.bank.rows(), seed, _QUERIES)
    if search is None or not learner.loss_fn.selects_neighbours or not len(query):
        return []
    chosen = bank.search(query, search.constraint, search.k, search.include_query)
    stats = neighbourhood_stats(query, bank, search.constraint, chosen, data.train.truth, search.include_query)
    shares = [100 * float(purity.nanmean()) for purity in (stats.constrained, stats.unconstrained, stats.as_far)]
    if any(map(math.isnan, shares)):
        return []
    note = (
        f"of C; {shares[1]:.0f} % of as many of M; {shares[2]:.0f} % as far out in M, to rank {median_rank(stats.rank)}"
    )
    return [Stat("purity of the last bank", f"{shares[0]:.0f} %", note)]


def _ranks_by_size(learner: Learner, seed: int) -> list[Plot]:
    """Plots the ranks that the same bank has with other k′ (the ablation of k′, right half of that table)."""
    search, bank, query = learner.loss_fn.logged_search, learner.bank, sample_rows(learner.bank.rows(), seed, _QUERIES)
    if search is None or search.k is None or not isinstance(search.constraint, NearCompanion):
        return []
    counts = {}
    for size in track(_SIZES, "ranks by the size of C", len(_SIZES)):
        if search.k <= size <= len(query):
            row = bank.search(query, NearCompanion(size), search.k, search.include_query).row
            assert row is not None
            counts[f"k′ = {size}"] = (histogram(rank_of_last(query, bank, row)), len(query))
    if not counts:
        return []
    caption = (
        f"Of {len(query)} queries of the last bank, the share whose neighbour number {search.k} in C is in each bin "
        f"of five ranks in M, for several sizes of C; farther ones than {HISTOGRAM_TO} are not shown."
    )
    return [Plot(RELATED, "rank-by-size", "Ranks by the size of C", caption, rank_histogram(counts))]


def collect_classes(images: EmbeddedImages) -> tuple[ClassReport | None, list[str]]:
    """Returns the table of true classes, and what is missing of it."""
    data = images.data
    if not bool((data.train.truth != UNKNOWN).any()):
        return None, ["no true class is known, so there is no purity and no table of classes"]
    try:
        test_truth = None if data.test is None else data.test.truth
        table = class_report(data.classes, images.train, data.train.truth, images.test, test_truth, images.graph)
    except BadInput as error:
        return None, [f"there is no table of classes: {error}"]
    note = "no test image has a known class, so each training image is classified by all the others"
    return table, [note] if table.left_out else []


def _confusion(table: ClassReport, names: tuple[str, ...]) -> list[Plot]:
    if not 1 < len(names) <= _LARGEST_CONFUSION:
        return []
    with plot_style():
        figure = confusion_figure(table.counts, names)
    images = "training images, each by all the others" if table.left_out else "test images"
    caption = (
        f"By the vote of the 20 nearest training images; {int(table.counts.sum()):,} {images}, % of each true class."
    )
    return [Plot("What is taken for what", "confusion", "True classes and what they are taken for", caption, figure)]


def collect_suspects(pool: PoolBuilder) -> tuple[tuple[tuple[int, Suspect], ...], str, list[str]]:
    """Returns the likeliest suspects with their images on the page, how many there are in all, and what is missing."""
    data, train = pool.images.data, pool.images.train
    try:
        labelled = find_label_issues(lambda _: train[data.train.labelled], data, 0.0, pool.images.graph)
    except BadInput as error:
        return (), "", [f"labels were not checked: {str(error).split(';')[0]}"]
    suspects = [suspect for suspect in labelled if suspect.score >= THRESHOLD]
    listed = suspects[: min(_LISTED, pool.max_images // _SUSPECT_SHARE)]
    about = (
        f"{len(suspects):,} of {len(labelled):,} labels have a score of {THRESHOLD:g} or above: another class has nine "
        "times their vote."
    )
    if len(listed) < len(suspects):
        about += f" The likeliest {len(listed)} are here; cmsf suspects writes them all."
    counts = compare_with_truth(labelled, THRESHOLD)
    if counts is not None:
        about += (
            f" By the truth {counts.wrong:,} labels are wrong: {100 * counts.precision:.1f} % of the suspects are "
            f"(precision), and {100 * counts.recall:.1f} % of the wrong ones are suspects (recall)."
        )
    return tuple((pool.add(suspect.index), suspect) for suspect in listed), about, []
