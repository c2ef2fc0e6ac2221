"""The library's front door: train, fine-tune, load, evaluate."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from cmsf.data import DataRequest, open_source
from cmsf.data.loader import worker_count
from cmsf.evaluation.finetune import FINE_TUNE_MODES, FineTuneMode, FineTuneSettings
from cmsf.method.build import make_learner, pretrained_weights
from cmsf.models.weights import is_timm_name
from cmsf.recipes import get_recipe, has_scale
from cmsf.recipes.recipe import Recipe, british
from cmsf.report.write import LiveReport, write_report
from cmsf.runs.classifier import Classifier, FinetuneOptions, finetune_run
from cmsf.runs.environment import BANK_SHARDED, INIT_SHA256, describe_environment
from cmsf.runs.folder import RunFolder
from cmsf.runs.run import Run
from cmsf.training.options import OnCollapse, OnFullDisk, TrainingOptions
from cmsf.training.resolve import LARGEST_SMALL_IMAGE, resolve, view_size
from cmsf.training.trainer import Trainer
from cmsf.utils.device import pick_device
from cmsf.utils.distributed import World, init_process_group
from cmsf.utils.errors import BadInput, did_you_mean, first_few
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import check_integer
from cmsf.utils.screen import Screen

MOST_ROUNDS = 100


def train(
    recipe: str | Recipe = "cmsf-self",
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    labels: str | Path | None = None,
    val: str | Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    screen: Screen | None = None,
    checkpoint_minutes: float = TrainingOptions.checkpoint_minutes,
    on_full_disk: OnFullDisk = TrainingOptions.on_full_disk,
    on_collapse: OnCollapse = TrainingOptions.on_collapse,
    bank_sharded: bool = False,
    report: bool = False,
    **changes: Any,
) -> Run:
    """Trains a recipe on a source of images; the same call again resumes.

    recipe: METHOD, METHOD-SCALE, METHOD+VARIANT-SCALE, a saved recipe.yaml, or a Recipe.
    data: a folder of images, a .csv or .parquet list, an .npz, torchvision:NAME, hf:NAME or wds:SHARDS; None for the
        embedded sample.
    labels: a list of path (or index) and label that replaces the training labels; the source's own are then used for
        purity and evaluation alone.
    val: a source to test on; without it, a split of the data, or a tenth of its labelled images.
    workers: processes that decode images which are not held in memory; by default one a core.
    out: the run folder, by default runs/ and the recipe's or the file's name.
    checkpoint_minutes, on_full_disk, on_collapse: as in cmsf.training.options.TrainingOptions.
    bank_sharded: of several processes (started by torchrun, or by srun), each holds but a share of the bank.
    report: keep report.html in the run folder up to date, and write the whole of it at the end.
    changes: any field of the recipe, e.g. epochs=100, or init="resnet18.a1_in1k" for weights to start from.
    """
    options = TrainingOptions(checkpoint_minutes, on_full_disk, on_collapse)
    world = World.from_env()
    screen = screen or Screen(quiet=quiet or not world.is_main)
    where = pick_device(device, world.local_rank)
    with screen.bars(), init_process_group(world, where):
        if not world.is_main:
            world.barrier()  # until the first process has made the folder, which says how images are kept
        request = DataRequest.of(data, labels, val)
        source = open_source(data)
        side = source.median_side()
        if isinstance(recipe, str):
            name, recipe = recipe, get_recipe(recipe, small_images=side <= LARGEST_SMALL_IMAGE)
            out = Path("runs") / (Path(name).stem if has_scale(name) else recipe.name) if out is None else out
            if not has_scale(name):
                screen.print(f"{name} is {recipe.name} here: the images are {side} px on their shorter side")
        recipe = _with_absolute_paths(recipe.changed(changes))
        folder = RunFolder(Path("runs") / recipe.name if out is None else expand_user(out))
        folder.check_free()

        images = folder.load_images(source, request, recipe, view_size(recipe, side))
        if folder.exists() and folder.request() == request:  # before their number decides what fits
            folder.check_same_paths(images, "start another run")
        shares = world.size if bank_sharded else 1
        resolved = resolve(recipe, images, side, world.local_size, shares, world.size)
        for line in images.describe():
            screen.print(line)
        environment = describe_environment(request, resolved, str(where), world.size, bank_sharded)
        differences = folder.check_same_recipe(resolved, environment) if folder.exists() else []
        start = None if folder.has_checkpoint() else pretrained_weights(resolved)
        if start is not None:
            environment[INIT_SHA256] = start.sha256
            if folder.exists():
                folder.check_same_start(start)
            if start.note:
                screen.print(start.note)
        # What cannot be built leaves no folder behind.
        learner = make_learner(resolved, images.train.label, where, start, world, bank_sharded)
        if resolved.batch_size < world.size:
            raise BadInput(
                f"--batch-size {resolved.batch_size} is less than {world.size} processes; "
                "use a larger --batch-size, or fewer processes"
            )
        if not folder.exists():
            if not world.is_main:
                raise BadInput(
                    f"process {world.rank} of {world.size} does not see {folder.path}; the run folder must be on a "
                    "file system that all of them share"
                )
            folder.create(resolved, environment, images)
        with folder.locked() if world.is_main else nullcontext():
            if world.is_main:
                world.barrier()
            world.fail_together(lambda: folder.check_same_images(images))
            if folder.is_complete():
                screen.print(f"{folder.path} is complete already; remove it to train again")
            else:
                for difference in differences:
                    screen.print(f"{difference}: the run will not equal an uninterrupted one bit for bit")
                after_epoch = LiveReport(folder, screen.print) if report else lambda: None
                count = worker_count(workers)
                Trainer(resolved, learner, images, folder, screen, count, options, after_epoch).fit()
    run = Run(folder.path)
    if report and world.is_main:
        with screen.bars():
            write_report([run], folder.report_file, device, workers, screen.print)
    return run


def resume(
    run: str | Path,
    data: str | Path | None = None,
    *,
    labels: str | Path | None = None,
    val: str | Path | None = None,
    quiet: bool = False,
    screen: Screen | None = None,
    **given: Any,
) -> Run:
    """Resumes a run that was stopped: its folder says the recipe and the images.

    given: device, workers and training options as in `train`. Fields of the recipe, `data`, `labels` and `val` are
    optional, and must then be those of the run; but data that is a shell command is run only if it is given.
    """
    screen = screen or Screen(quiet=quiet or not World.from_env().is_main)
    previous = Run(run)
    if previous.folder.is_complete() and not given.get("report"):
        screen.print(f"{previous.path} is complete already; remove it to train again")
        return previous
    kept = previous.folder.request()
    if data is None or (val is None and kept.val is not None):
        previous.request()  # which refuses what would run a command
    sources = {"data": data, "labels": labels, "val": val}
    named = {name: getattr(DataRequest.of(**sources), name) for name, value in sources.items() if value is not None}
    given = british(given)
    named |= {name: given.pop(name) for name in [*given] if name in asdict(previous.recipe)}
    recorded = asdict(kept) | asdict(previous.recipe)
    differences = [
        f"{name}: {value} against {recorded[name]}" for name, value in named.items() if value != recorded[name]
    ]
    if differences:
        raise BadInput(
            f"{previous.path} was started with other settings ({first_few(differences)}); leave them out, or "
            "train in another --out"
        )
    given["device"] = _previous_device(previous, given.get("device", "auto"))
    given["bank_sharded"] = given.get("bank_sharded") or previous.folder.environment().get(BANK_SHARDED) is True
    return train(previous.recipe, kept.data, previous.path, labels=kept.labels, val=kept.val, screen=screen, **given)


def _previous_device(run: Run, device: str) -> str:
    """Returns the device that the run had, where none is named and it is available here."""
    recorded = run.folder.environment().get("device")
    if device != "auto" or not isinstance(recorded, str):
        return device
    if not World.from_env().alone:
        recorded = recorded.split(":")[0]  # of several processes, each has a device of its own
    try:
        pick_device(recorded)
    except BadInput:
        return device
    return recorded


def finetune(
    run: str | Path,
    labels: str | Path | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    rounds: int = 1,
    tune: FineTuneMode = "whole",
    random_weights: bool = False,
    epochs: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
) -> Classifier:
    """Fine-tunes a run on labelled images to a classifier, in the folder `out` (by default the run's and -classifier).

    labels: a list of path (or index) and label that replaces the labels of the run's images; data: other images.
    rounds: from the second on, it also learns from unlabelled images that it was confident of.
    tune: the whole network and a two-layer head; that head alone; or one linear layer alone.
    random_weights: start from the seed's random weights instead of the run's.
    epochs, lr: of each round, by default the paper's 20 (more where images are few) and 0.005; a linear layer is fitted
        to convergence.
    """
    source = Run(run)
    settings = _finetune_options(source, rounds, tune, random_weights, epochs, lr, seed)
    screen, folder = Screen(quiet=quiet), RunFolder(_beside(source.path) if out is None else expand_user(out))
    folder.check_new()
    with screen.bars():
        finetune_run(source, settings, folder, data, labels, pick_device(device), worker_count(workers), screen.print)
    return Classifier(folder.path)


def load(run: str | Path, device: str = "cpu") -> nn.Module:
    """Returns the trained backbone of a run: a plain torch module in eval mode, images in, pooled features out."""
    return Run(run).backbone(device)


def _beside(run: Path) -> Path:
    named = run if run.name not in ("", "..") else run.resolve()
    return named.with_name(f"{named.name}-classifier")


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Makes the paths of a class mapping and of weights absolute, so that the recipe works from any directory."""
    if recipe.coarse_labels not in ("none", "wordnet"):
        recipe = replace(recipe, coarse_labels=str(expand_user(recipe.coarse_labels).absolute()))
    if recipe.init != "none" and not is_timm_name(recipe.init):
        recipe = replace(recipe, init=str(expand_user(recipe.init).absolute()))
    return recipe


def _finetune_options(
    run: Run, rounds: int, tune: str, random_weights: bool, epochs: int | None, lr: float | None, seed: int | None
) -> FinetuneOptions:
    """Checks the values; those of a recipe's fields have the same bounds."""
    given = {"epochs": epochs, "lr": lr, "seed": seed}
    Recipe().changed({name: value for name, value in given.items() if value is not None})
    check_integer("--rounds", rounds, 1, MOST_ROUNDS)
    if tune == "linear" and (epochs is not None or lr is not None):
        flag = "--epochs" if lr is None else "--lr"
        raise BadInput(f"{flag} is for --tune whole and head; a linear layer is fitted to convergence; leave it out")
    kind = next((name for name in FINE_TUNE_MODES if name == tune), None)
    if kind is None:
        hint = did_you_mean(str(tune), FINE_TUNE_MODES, f"use {', '.join(FINE_TUNE_MODES)}")
        raise BadInput(f"invalid value --tune {tune}; {hint}")
    return FinetuneOptions(
        rounds,
        kind,
        random_weights,
        run.recipe.seed if seed is None else seed,
        FineTuneSettings().with_overrides(epochs, lr),
    )
