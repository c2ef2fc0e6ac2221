"""The library's front door: train, fine-tune, load, evaluate."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from cmsf.data import DataConfig, Dataset, open_source
from cmsf.data.loader import worker_count
from cmsf.evaluation.finetune import FineTuneSettings
from cmsf.evaluation.model_selection import TUNE_OPTIONS, TuneOption
from cmsf.method.build import make_learner, pretrained_weights
from cmsf.method.learner import Learner
from cmsf.models.expected_input import expected_input, network_metadata, network_of_file
from cmsf.models.precision import pick_precision
from cmsf.models.weights import find_weights_file, is_timm_name, save_weights, to_safetensors
from cmsf.recipes import ADAPT, get_recipe, has_scale, scale_of
from cmsf.recipes.recipe import AUTO, INPUT_SETTINGS, Recipe, ResolvedRecipe, british
from cmsf.report.write import LiveReport, write_report
from cmsf.runs.classifier import Classifier, FinetuneOptions, finetune_run
from cmsf.runs.environment import BANK_SHARDED, INIT_SHA256, describe_environment
from cmsf.runs.folder import RunFolder
from cmsf.runs.run import Run
from cmsf.training.best_weights import NothingToJudgeBy, split_labels
from cmsf.training.options import OnCollapse, OnFullDisk, TrainingOptions
from cmsf.training.resolve import LARGEST_SMALL_IMAGE, resolve, view_size
from cmsf.training.trainer import Trainer
from cmsf.utils.constants import WEIGHT_FILES
from cmsf.utils.device import pick_device
from cmsf.utils.distributed import World, init_process_group
from cmsf.utils.errors import BadInput, did_you_mean, first_few
from cmsf.utils.files import expand_user, make_folder
from cmsf.utils.numbers import check_integer
from cmsf.utils.screen import Screen

MOST_ROUNDS = 100
NO_INIT = "none"
FEW_PHOTOS = 50_000
EXAMPLE_WEIGHTS = "vit_small_patch14_dinov2.lvd142m"
_INPUT_FLAGS = "--size, --mean, --std, --interpolation, --crop-pct"


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
        chosen = _with_backbone(chosen, folder)
        if chosen.precision == AUTO:
            chosen = _with_precision(chosen, folder, torch_device, screen)
        if chosen.init != "none":
            chosen = _with_input_of_weights(chosen, folder, side, screen)
        images = folder.load_images(source, data_config, chosen, view_size(chosen, side))
        if folder.exists() and folder.data_config() == data_config:  # before their number decides what fits
            folder.check_same_paths(images, "start another run")
        resolved = resolve(chosen, images, side, world.local_size, world.size if bank_sharded else 1, world.size)
        for line in (*images.describe(), *_recommend_weights(resolved, images, side, data)):
            screen.print(line)
        if resolved.batch_norm == "shuffle" and world.alone:
            screen.print(
                "--batch-norm shuffle does nothing here: it exchanges images between processes, and this is one"
            )
        try:
            training_images, judge = split_labels(resolved, images)
        except NothingToJudgeBy as error:
            if "keep" in changes or not isinstance(recipe, str) or recipe.endswith((".yaml", ".yml")):
                raise
            screen.print(f"{error.reason}, so the last epoch is kept")
            chosen, resolved = replace(chosen, keep="last"), replace(resolved, keep="last")
            training_images, judge = images, None
        if training_images is not images:  # what comes beside a batch is drawn from the labels that are left
            resolved = resolve(
                chosen, training_images, side, world.local_size, world.size if bank_sharded else 1, world.size
            )
        learner, differences = _open_run(
            folder,
            data_config,
            resolved,
            images,
            training_images.train.label,
            torch_device,
            world,
            bank_sharded,
            screen,
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
                Trainer(resolved, learner, training_images, folder, screen, count, options, after_epoch, judge).fit()
    run = Run(folder.path)
    if report and world.is_main:
        with screen.bars():
            write_report([run], folder.report_file, device, workers, screen.print)
    return run


def _choose_recipe(
    recipe: str | Recipe, changes: dict[str, Any], side: int, out: str | Path | None, screen: Screen
) -> tuple[Recipe, Path]:
    """Returns the recipe, of the scale that suits images of this side, with the changes, and the run folder's path."""
    default, small = None, side <= LARGEST_SMALL_IMAGE
    changes = {name: str(value) if isinstance(value, Path) else value for name, value in changes.items()}
    if isinstance(recipe, str):
        name, pretrained = recipe, changes.get("init", NO_INIT) != NO_INIT
        if not has_scale(name) and (scale := _scale_before(name, small, changes, out)) is not None:
            name = f"{name}-{scale}"
        recipe = get_recipe(name, small, pretrained)
        default = Path(name).stem if has_scale(name) else recipe.name
        if not has_scale(name):
            reason = "it starts from --init" if pretrained else f"the images are {side} px on their shorter side"
            screen.print(f"{name} is {recipe.name} here: {reason}")
    recipe = recipe.changed(changes)
    if default is not None and "freeze_epochs" not in changes and recipe.freeze_epochs >= recipe.epochs > 0:
        recipe = replace(recipe, freeze_epochs=recipe.epochs - 1)
        screen.print(f"--epochs {recipe.epochs} is short, so --freeze-epochs is {recipe.freeze_epochs} here")
    # So that the recipe works from any directory.
    if recipe.coarse_labels not in ("none", "wordnet"):
        recipe = replace(recipe, coarse_labels=str(expand_user(recipe.coarse_labels).absolute()))
    recipe = replace(recipe, init=_from_anywhere(recipe.init))
    return recipe, Path("runs", default or recipe.name) if out is None else expand_user(out)


def _from_anywhere(init: str) -> str:
    """Returns --init with the full path of a file or run."""
    return init if init == NO_INIT or is_timm_name(init) else str(expand_user(init).absolute())


def _scale_before(name: str, small: bool, changes: Mapping[str, Any], out: str | Path | None) -> str | None:
    """Returns the scale of the run that is there: it keeps it, whatever a new one would have.

    Without `out`, a run from the same weights may lie where `small` and `standard` have their place: before there was
    `adapt`, it was of these.
    """
    folder = RunFolder(Path("runs", get_recipe(name, small).name) if out is None else expand_user(out))
    if not folder.exists():
        return None
    before, init = folder.recipe(), changes.get("init", NO_INIT)
    same = out is not None or (isinstance(init, str) and _from_anywhere(init) == before.init)
    return scale_of(before.name) if same else None


def _with_backbone(recipe: Recipe, folder: RunFolder) -> Recipe:
    """Returns the recipe with the network of its starting weights, where it names none itself."""
    if recipe.init == NO_INIT:
        if recipe.backbone == AUTO or scale_of(recipe.name) == ADAPT:
            raise BadInput(
                f"{recipe.name} starts from weights that others have trained; add --init NAME (timm's), a file or a "
                "run, or use another scale"
            )
        if recipe.batch_norm == "frozen":
            raise BadInput(
                "--batch-norm frozen keeps the statistics of starting weights, and random ones have none; add --init, "
                "or use --batch-norm sync"
            )
    if recipe.backbone != AUTO:
        return recipe
    if folder.exists():
        return replace(recipe, backbone=folder.recipe().backbone, stem=folder.recipe().stem)
    if is_timm_name(recipe.init):
        return replace(recipe, backbone=recipe.init.split(".")[0])
    start = RunFolder(Path(recipe.init))
    if start.exists():
        return replace(recipe, backbone=start.recipe().backbone, stem=start.recipe().stem)
    if named := network_of_file(Path(recipe.init)):
        return recipe.changed(named | ({"stem": recipe.stem} if recipe.stem != "standard" else {}))
    raise BadInput(f"--init {recipe.init} does not say which network it is of; add --backbone with timm's name of it")


def _recommend_weights(recipe: ResolvedRecipe, images: Dataset, side: int, data: str | Path | None) -> list[str]:
    """Returns the advice to start from others' weights, for photos that are few to learn from nothing."""
    few = len(images.train) < FEW_PHOTOS and side > LARGEST_SMALL_IMAGE
    if recipe.init != NO_INIT or not few or recipe.epochs == 0:
        return []
    method = recipe.name.removesuffix(f"-{scale_of(recipe.name)}")
    return [
        f"{len(images.train):,} photos are few to learn from nothing; weights that others have trained are a better "
        f"start: cmsf train {method} --init {EXAMPLE_WEIGHTS} --data {data}"
    ]


def _with_precision(recipe: Recipe, folder: RunFolder, device: torch.device, screen: Screen) -> Recipe:
    """Returns the recipe with the precision of the run that is there, or the fastest of this device."""
    precision, reason = (folder.recipe().precision, "as the run began") if folder.exists() else pick_precision(device)
    screen.print(f"--precision auto is {precision} here: {reason}")
    return replace(recipe, precision=precision)


def _with_input_of_weights(recipe: Recipe, folder: RunFolder, side: int, screen: Screen) -> Recipe:
    """Returns the recipe with images as its weights expect them, or as the run that is there has them."""
    if folder.exists():  # which needs its weights no more
        before = asdict(folder.recipe())
        return recipe.filled({name: before[name] for name in ("size", *INPUT_SETTINGS)})
    expected = expected_input(recipe.init, recipe.backbone)
    if expected is None:
        screen.print(
            f"what images --init {recipe.init} expects is not known: they are as without; {_INPUT_FLAGS} set them"
        )
        return recipe
    recipe = expected.fit(recipe, side)
    screen.print(
        f"images of {recipe.size} px, mean {recipe.mean}, std {recipe.std}, {recipe.interpolation}, crop "
        f"{recipe.crop_pct:g}, by {expected.origin}; {_INPUT_FLAGS} set them"
    )
    return recipe


def _open_run(
    folder: RunFolder,
    data_config: DataConfig,
    recipe: ResolvedRecipe,
    images: Dataset,
    label: Int[Tensor, " n"],
    device: torch.device,
    world: World,
    bank_sharded: bool,
    screen: Screen,
) -> tuple[Learner, list[str]]:
    """Builds the learner and creates the run folder, or checks that an existing one is of the same run.

    label: those of the training images that training may use.
    Returns the learner as it is at step 0, and what keeps a resumed run from being bit for bit.
    """
    environment = describe_environment(data_config, recipe, str(device), world.size, bank_sharded)
    differences = folder.check_same_recipe(recipe, environment) if folder.exists() else []
    start = None if folder.has_checkpoint() else pretrained_weights(recipe)
    if start is not None:
        environment[INIT_SHA256] = start.sha256
        if folder.exists():
            folder.check_same_start(start)
        for note in start.notes:
            screen.print(note)
    # What cannot be built leaves no folder behind.
    learner = make_learner(recipe, label, device, start, world, bank_sharded)
    if recipe.batch_size % (recipe.accumulate * world.size) and recipe.accumulate > 1:
        raise BadInput(
            f"--accumulate {recipe.accumulate} in {world.size} processes does not divide --batch-size "
            f"{recipe.batch_size} evenly; choose numbers that do"
        )
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


def from_weights(
    init: str | Path | nn.Module,
    data: str | Path,
    out: str | Path | None = None,
    *,
    backbone: str = AUTO,
    device: str = "auto",
    workers: int | None = None,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Returns a run of weights as they are, without any training, to evaluate, embed, report, clean or fine-tune.

    init: a timm name, a file, a run, or a network made by timm; backbone: timm's name of it, if init does not say it.
    out: the run folder. By default it is in runs/, named by the weights and the data, with a hash of both and of the
        settings: the same call uses it again, and other weights or images have another.
    changes: fields of the recipe, such as size.
    """
    if isinstance(init, nn.Module):
        init, backbone = _save_network(init, backbone, out)
    changes |= {"init": str(init), "backbone": backbone, "epochs": 0}
    out = default_folder(data, changes) if out is None else out
    return train("byol-adapt", data, out, device=device, workers=workers, quiet=quiet, **changes)


def default_folder(data: str | Path, changes: Mapping[str, Any]) -> Path:
    """Returns where a run of weights without training lies: other weights, images or settings have another folder.

    Images are known by their paths and classes, a file of weights by its size and the time of its last change.
    """
    init, source = _from_anywhere(str(changes["init"])), open_source(data)
    written = None
    if not is_timm_name(init):
        about = find_weights_file(Path(init)).stat()
        written = (about.st_size, about.st_mtime_ns)
    images = {name: [split.images.paths, split.names] for name, split in source.splits.items()}
    settings = sorted((name, value) for name, value in changes.items() if name not in ("init", "skip_broken"))
    known = [init, written, DataConfig.resolve(data).data, images, settings]
    digest = hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()[:8]
    weights = Path(init).stem if Path(init).suffix in WEIGHT_FILES else Path(init).name
    return Path("runs", f"{weights}-{re.sub('[^0-9A-Za-z_.-]+', '-', source.name)}-{digest}")


def _save_network(network: nn.Module, backbone: str, out: str | Path | None) -> tuple[Path, str]:
    """Writes a network's weights beside the run that is to hold them; returns the file, and timm's name of it."""
    if backbone == AUTO:
        backbone = (getattr(network, "pretrained_cfg", None) or {}).get("architecture", AUTO)
    if backbone == AUTO or out is None:
        missing = "backbone, timm's name of it" if backbone == AUTO else "out, the run folder"
        raise BadInput(f"a network in memory does not say all that a run of it needs; add {missing}")
    folder = RunFolder(expand_user(out))
    folder.check_free()
    file = folder.path.with_name(f"{folder.path.name}.safetensors")
    metadata = network_metadata(network, backbone)
    if not file.exists():
        make_folder(file.parent)
        save_weights(network, file, metadata)
    elif file.read_bytes() != to_safetensors(network, metadata):
        raise BadInput(f"{file} is there and holds something else than this network; choose another out")
    return file, backbone


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
    tune: TuneOption = "auto",
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
    tune: "whole", the network and a two-layer head; "head", that alone; "linear", one linear layer alone; or "auto",
        which of them is best in cross-validation on the labels.
    random_weights: start from the seed's random weights instead of the run's.
    epochs, lr: of each round of whole and head, and of their cross-validation, by default the paper's 20 (more where
        images are few) and 0.005; a linear layer is fitted to convergence.
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
    tune: TuneOption,
    random_weights: bool,
    epochs: int | None,
    lr: float | None,
    seed: int | None,
) -> FinetuneOptions:
    """Checks the values; those of a recipe's fields have the same bounds."""
    overrides = {"epochs": epochs, "lr": lr, "seed": seed}
    Recipe().changed({name: value for name, value in overrides.items() if value is not None})
    if lr == 0:
        raise BadInput("--lr 0 would leave a classifier as it was drawn; use a larger one, or --tune linear")
    check_integer("--rounds", rounds, 1, MOST_ROUNDS)
    if tune == "linear" and (epochs is not None or lr is not None):
        flag = "--epochs" if lr is None else "--lr"
        raise BadInput(f"{flag} is for --tune whole and head; a linear layer is fitted to convergence; leave it out")
    if tune not in TUNE_OPTIONS:
        hint = did_you_mean(str(tune), TUNE_OPTIONS, f"use {', '.join(TUNE_OPTIONS)}")
        raise BadInput(f"invalid value --tune {tune}; {hint}")
    seed = run.recipe.seed if seed is None else seed
    return FinetuneOptions(rounds, tune, random_weights, seed, FineTuneSettings().with_overrides(epochs, lr))
