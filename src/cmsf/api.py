"""The library's front door: train, fine-tune, load, evaluate."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cmsf.data import DataConfig, Dataset, open_source
from cmsf.data.loader import worker_count
from cmsf.evaluation.finetune import FINE_TUNE_MODES, FineTuneMode, FineTuneSettings
from cmsf.method.build import make_learner, pretrained_weights
from cmsf.method.learner import Learner
from cmsf.models.precision import pick_precision
from cmsf.models.weights import is_timm_name
from cmsf.recipes import get_recipe, has_scale
from cmsf.recipes.recipe import AUTO, Recipe, ResolvedRecipe, british
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
    torch_device = pick_device(device, world.local_rank)
    with screen.bars(), init_process_group(world, torch_device):
        if not world.is_main:
            world.barrier()  # until the first process has made the folder, which says how images are kept
        data_config, source = DataConfig.resolve(data, labels, val), open_source(data)
        side = source.median_side()
        chosen, path = _choose_recipe(recipe, changes, side, out, screen)
        folder = RunFolder(path)
        folder.check_free()
        if chosen.precision == AUTO:
            chosen = _with_precision(chosen, folder, torch_device, screen)
        images = folder.load_images(source, data_config, chosen, view_size(chosen, side))
        if folder.exists() and folder.data_config() == data_config:  # before their number decides what fits
            folder.check_same_paths(images, "start another run")
        resolved = resolve(chosen, images, side, world.local_size, world.size if bank_sharded else 1, world.size)
        for line in images.describe():
            screen.print(line)
        learner, differences = _open_run(
            folder, data_config, resolved, images, torch_device, world, bank_sharded, screen
        )
        with folder.locked() if world.is_main else nullcontext():
            if world.is_main:
                world.barrier()
            world.raise_on_all_ranks(lambda: folder.check_same_images(images))
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


def _choose_recipe(
    recipe: str | Recipe, changes: dict[str, Any], side: int, out: str | Path | None, screen: Screen
) -> tuple[Recipe, Path]:
    """Returns the recipe, of the scale that suits images of this side, with the changes, and the run folder's path."""
    default = None
    if isinstance(recipe, str):
        name, recipe = recipe, get_recipe(recipe, small_images=side <= LARGEST_SMALL_IMAGE)
        default = Path(name).stem if has_scale(name) else recipe.name
        if not has_scale(name):
            screen.print(f"{name} is {recipe.name} here: the images are {side} px on their shorter side")
    recipe = recipe.changed(changes)
    # So that the recipe works from any directory.
    if recipe.coarse_labels not in ("none", "wordnet"):
        recipe = replace(recipe, coarse_labels=str(expand_user(recipe.coarse_labels).absolute()))
    if recipe.init != "none" and not is_timm_name(recipe.init):
        recipe = replace(recipe, init=str(expand_user(recipe.init).absolute()))
    return recipe, Path("runs", default or recipe.name) if out is None else expand_user(out)


def _with_precision(recipe: Recipe, folder: RunFolder, device: torch.device, screen: Screen) -> Recipe:
    """Returns the recipe with the precision of the run that is there, or the fastest of this device."""
    precision, reason = (folder.recipe().precision, "as the run began") if folder.exists() else pick_precision(device)
    screen.print(f"--precision auto is {precision} here: {reason}")
    return replace(recipe, precision=precision)


def _open_run(
    folder: RunFolder,
    data_config: DataConfig,
    recipe: ResolvedRecipe,
    images: Dataset,
    device: torch.device,
    world: World,
    bank_sharded: bool,
    screen: Screen,
) -> tuple[Learner, list[str]]:
    """Builds the learner and creates the run folder, or checks that an existing one is of the same run.

    Returns the learner as it is at step 0, and what keeps a resumed run from being bit for bit.
    """
    environment = describe_environment(data_config, recipe, str(device), world.size, bank_sharded)
    differences = folder.check_same_recipe(recipe, environment) if folder.exists() else []
    start = None if folder.has_checkpoint() else pretrained_weights(recipe)
    if start is not None:
        environment[INIT_SHA256] = start.sha256
        if folder.exists():
            folder.check_same_start(start)
        if start.note:
            screen.print(start.note)
    # What cannot be built leaves no folder behind.
    learner = make_learner(recipe, images.train.label, device, start, world, bank_sharded)
    if recipe.batch_size < world.size:
        raise BadInput(
            f"--batch-size {recipe.batch_size} is less than {world.size} processes; "
            "use a larger --batch-size, or fewer processes"
        )
    if not folder.exists():
        if not world.is_main:
            raise BadInput(
                f"process {world.rank} of {world.size} does not see {folder.path}; the run folder must be on a "
                "file system that all of them share"
            )
        folder.create(recipe, environment, images)
    return learner, differences


def resume(
    run: str | Path,
    data: str | Path | None = None,
    *,
    labels: str | Path | None = None,
    val: str | Path | None = None,
    quiet: bool = False,
    screen: Screen | None = None,
    **options: Any,
) -> Run:
    """Resumes a run that was stopped: its folder says the recipe and the images.

    options: device, workers and training options as in `train`. Fields of the recipe, `data`, `labels` and `val` are
    optional, and must then be those of the run; but data that is a shell command is run only if it is given.
    """
    screen = screen or Screen(quiet=quiet or not World.from_env().is_main)
    previous = Run(run)
    if previous.folder.is_complete() and not options.get("report"):
        screen.print(f"{previous.path} is complete already; remove it to train again")
        return previous
    data_config = previous.folder.data_config()
    if data is None or (val is None and data_config.val is not None):
        previous.data_config()  # which refuses what would run a command
    sources = {"data": data, "labels": labels, "val": val}
    named = {name: getattr(DataConfig.resolve(**sources), name) for name, value in sources.items() if value is not None}
    options = british(options)
    named |= {name: options.pop(name) for name in [*options] if name in asdict(previous.recipe)}
    if named.get("precision") == AUTO:  # which the run has settled
        del named["precision"]
    recorded = asdict(data_config) | asdict(previous.recipe)
    differences = [
        f"{name}: {value} against {recorded[name]}" for name, value in named.items() if value != recorded[name]
    ]
    if differences:
        raise BadInput(
            f"{previous.path} was started with other settings ({first_few(differences)}); leave them out, or "
            "train in another --out"
        )
    options["device"] = _previous_device(previous, options.get("device", "auto"))
    options["bank_sharded"] = options.get("bank_sharded") or previous.folder.environment().get(BANK_SHARDED) is True
    options |= {"labels": data_config.labels, "val": data_config.val, "screen": screen}
    return train(previous.recipe, data_config.data, previous.path, **options)


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
    options = _finetune_options(source, rounds, tune, random_weights, epochs, lr, seed)
    if out is None:
        path = source.path if source.path.name not in ("", "..") else source.path.resolve()
        out = path.with_name(f"{path.name}-classifier")
    screen, folder = Screen(quiet=quiet), RunFolder(expand_user(out))
    folder.check_new()
    with screen.bars():
        result = finetune_run(
            source, options, folder, data, labels, pick_device(device), worker_count(workers), screen.print
        )
    return Classifier(folder.path, result)


def load(run: str | Path, device: str = "cpu") -> nn.Module:
    """Returns the trained backbone of a run: a plain torch module in eval mode, images in, pooled features out."""
    return Run(run).backbone(device)


def _finetune_options(
    run: Run,
    rounds: int,
    tune: FineTuneMode,
    random_weights: bool,
    epochs: int | None,
    lr: float | None,
    seed: int | None,
) -> FinetuneOptions:
    """Checks the values; those of a recipe's fields have the same bounds."""
    overrides = {"epochs": epochs, "lr": lr, "seed": seed}
    Recipe().changed({name: value for name, value in overrides.items() if value is not None})
    check_integer("--rounds", rounds, 1, MOST_ROUNDS)
    if tune == "linear" and (epochs is not None or lr is not None):
        flag = "--epochs" if lr is None else "--lr"
        raise BadInput(f"{flag} is for --tune whole and head; a linear layer is fitted to convergence; leave it out")
    if tune not in FINE_TUNE_MODES:
        hint = did_you_mean(str(tune), FINE_TUNE_MODES, f"use {', '.join(FINE_TUNE_MODES)}")
        raise BadInput(f"invalid value --tune {tune}; {hint}")
    seed = run.recipe.seed if seed is None else seed
    return FinetuneOptions(rounds, tune, random_weights, seed, FineTuneSettings().with_overrides(epochs, lr))
