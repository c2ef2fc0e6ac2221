"""Checkpoints: the state of a learner, as hashed files under a manifest that is written last."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer

from cmsf.method.bank import EmbeddingCache, MemoryBank
from cmsf.method.learner import Learner
from cmsf.models.weights import load_strict
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.utils.errors import BadInput
from cmsf.utils.files import (
    HashedFile,
    atomic_write,
    check_regular_file,
    file_sha256,
    make_folder,
    read_json,
    write_json,
)
from cmsf.utils.numbers import is_integer
from cmsf.utils.progress import track

STATE, CACHE, CHANGED, BEST = "state", "cache", "changed", "best"
"""The parts: everything but the embedding cache; the whole cache; its rows that changed since a whole one was saved;
the best epoch's network, with --keep best."""
PROGRESS = "progress"
_KEPT = 3
_FORMAT = 1


class CorruptCheckpoint(BadInput):
    """A checkpoint that differs from what was written."""


@dataclass(frozen=True)
class CheckpointFile:
    """A file of tensors that a manifest names."""

    file: str
    size: int
    sha256: str

    def load(self, folder: Path) -> Any:
        """Returns the content after checking size and hash; raises CorruptCheckpoint."""
        path = folder / self.file
        try:
            if not path.exists():
                raise CorruptCheckpoint(f"its {self.file} is missing")
            size = check_regular_file(path)
            if size != self.size:
                raise CorruptCheckpoint(f"its {self.file} has {size} bytes instead of {self.size}")
            if file_sha256(path) != self.sha256:
                raise CorruptCheckpoint(f"its {self.file} is not what was written (sha256 differs)")
            return torch.load(path, map_location="cpu", weights_only=True)
        except CorruptCheckpoint:
            raise
        except Exception as error:  # a corrupt or hostile file may raise anything
            raise CorruptCheckpoint(f"its {self.file} cannot be read ({type(error).__name__})") from None


@dataclass(frozen=True)
class Checkpoint:
    """A manifest: the step, the recipe, and the files that hold the state."""

    path: Path
    step: int
    recipe: ResolvedRecipe
    parts: dict[str, CheckpointFile]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        corrupt = CorruptCheckpoint("it is not the manifest of a checkpoint")
        try:
            about = read_json(path)
        except BadInput:
            raise corrupt from None
        if not isinstance(about, dict) or about.get("format") != _FORMAT or not isinstance(about.get("parts"), dict):
            raise corrupt
        if about.get("sha256") != sha256_of_manifest(about):
            raise CorruptCheckpoint("its manifest is not what was written (sha256 differs)")
        try:
            parts = {name: CheckpointFile(**entry) for name, entry in about["parts"].items()}
            kinds = {(type(part.file), type(part.size), type(part.sha256)) for part in parts.values()}
        except TypeError:
            raise corrupt from None
        if not is_integer(about.get("step")) or kinds != {(str, int, str)}:
            raise corrupt
        if any(Path(part.file).name != part.file for part in parts.values()):  # no file outside the folder is read
            raise corrupt
        try:
            recipe = ResolvedRecipe.from_values(about.get("recipe"), "its recipe")
        except BadInput as error:
            raise CorruptCheckpoint(str(error)) from None
        return cls(path, about["step"], recipe, parts)

    def load(self) -> dict[str, Any]:
        """Returns the content of every part, each checked first."""
        parts = track(self.parts.items(), "checkpoint", len(self.parts))
        return {name: part.load(self.path.parent) for name, part in parts}


def save(
    folder: Path, step: int, recipe: ResolvedRecipe, contents: Mapping[str, Any], older: Mapping[str, CheckpointFile]
) -> Checkpoint:
    """Writes a checkpoint and removes old ones.

    The manifest is written last; until then the checkpoint does not exist. After a failure, none of its files stay.

    contents: the parts to write; older: parts that are on the disk already.
    """
    manifest, needed = folder / f"{_stem(step)}.json", sum(_nbytes(content) for content in contents.values())
    try:
        make_folder(folder)
        parts = {**older}
        for name, content in contents.items():
            parts[name] = _save_part(folder / f"{_stem(step)}-{name}.pt", content, needed)
        about = {
            "format": _FORMAT,
            "step": step,
            "parts": {name: asdict(part) for name, part in parts.items()},
            "recipe": asdict(recipe),
        }
        write_json(manifest, about | {"sha256": sha256_of_manifest(about)}, indent=1)
        _prune(folder, step)
    except BaseException as error:
        if not manifest.exists():
            for name in contents:
                with suppress(OSError):
                    (folder / f"{_stem(step)}-{name}.pt").unlink()
        if isinstance(error, OSError):
            raise BadInput(f"cannot write a checkpoint to {folder}: {error.strerror}") from None
        raise
    return Checkpoint(manifest, step, recipe, parts)


def sha256_of_manifest(about: Mapping[str, Any]) -> str:
    """Returns the hash of the manifest without its own "sha256" entry, independent of order and white space."""
    text = json.dumps({name: value for name, value in about.items() if name != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def manifests(folder: Path) -> list[Path]:
    """Returns the manifests of all checkpoints, oldest first; raises BadInput for an unreadable folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadInput(f"cannot read {folder}: {error.strerror}; make it readable") from None
    return sorted(folder / name for name in names if fnmatchcase(name, "step-*.json"))


def latest(folder: Path) -> Path | None:
    return next(reversed(manifests(folder)), None)


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _save_part(path: Path, content: Any, needed: int) -> CheckpointFile:
    with atomic_write(path, needed) as temporary:
        file = HashedFile(temporary)
        torch.save(content, file)  # type: ignore[arg-type]  # torch.save only writes
        sha256 = file.finish()
    return CheckpointFile(path.name, file.size, sha256)


def _prune(folder: Path, step: int) -> None:
    """Keeps the newest few checkpoints and their files. Steps after this one belong to an abandoned attempt."""
    present = manifests(folder)
    kept = [path for path in present if path.stem <= _stem(step)][-_KEPT:]
    named = {path.name for path in kept}
    for path in kept:
        with suppress(BadInput):
            named |= {part.file for part in Checkpoint.read(path).parts.values()}
    # The run is locked, so no other process is writing these.
    for path in (*present, *folder.glob("step-*.pt"), *folder.glob(".step-*.part")):
        if path.name not in named:
            path.unlink(missing_ok=True)


def _nbytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(_nbytes, content.values()))
    return sum(map(_nbytes, content)) if isinstance(content, list | tuple) else 0


def state_dict(learner: Learner) -> dict[str, Any]:
    """Returns a copy on the CPU of all state but the embedding cache, which grows with the data."""
    state = {
        "encoders": learner.encoders.state_dict(),
        "optimiser": learner.optimizer.state_dict()["state"],  # param_groups are rebuilt from the recipe
        "bank": learner.bank.full_state_dict(),
        "scaler": learner.scaler.state_dict(),
        "knowledge": learner.supervision.state_dict(),
    }
    copied: dict[str, Any] = _to_cpu(state)
    return copied


def load_state(learner: Learner, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the loaded parts into the learner; returns the trainer's progress that was saved with them.

    Raises CorruptCheckpoint where something does not fit; the learner's state is then undefined.
    """
    state = _require(contents.get(STATE), ("encoders", "optimiser", "bank", "scaler", "knowledge", PROGRESS))
    try:
        bank = _require(state["bank"], ("index",))
        _check_tensor(bank["index"], learner.bank.index, "bank index")  # before a share is taken of it
        for name, module, saved in (
            ("encoders", learner.encoders, state["encoders"]),
            ("bank", learner.bank, learner.bank.shard_state_dict(bank)),
        ):
            load_strict(module, saved, "it")
            _check_matches(saved, module.state_dict(), name)
        _check_ring(learner.bank)
        _load_optimizer(learner.optimizer, state["optimiser"])
        _load_scaler(learner.scaler, state["scaler"])
        _check_matches(state["knowledge"], learner.supervision.state_dict(), "knowledge")
        learner.supervision.load_state_dict(state["knowledge"])
        if learner.supervision.companion_cache is not None:
            _load_cache(learner.supervision.companion_cache, contents)
    except BadInput as error:
        raise CorruptCheckpoint(str(error)) from None
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CorruptCheckpoint(f"its content does not fit ({type(error).__name__})") from None
    progress: dict[str, Any] = _require(state[PROGRESS], ())
    return progress


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _to_cpu(item) for name, item in value.items()}
    return [_to_cpu(item) for item in value] if isinstance(value, list | tuple) else value


def _require(saved: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(saved, dict) or not set(names) <= saved.keys():
        raise CorruptCheckpoint(f"it lacks what a checkpoint has, such as {names[0] if names else PROGRESS}")
    return saved


def _check_matches(saved: Any, own: Mapping[str, Any], name: str) -> None:
    """Raises CorruptCheckpoint unless names, shapes and dtypes are those of `own`."""
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        raise CorruptCheckpoint(f"its {name} has other entries")
    for key, value in own.items():
        if isinstance(value, Tensor):
            _check_tensor(saved[key], value, f"{name} {key}")


def _check_tensor(saved: Any, own: Tensor, name: str, rows: int | None = None) -> None:
    """Raises CorruptCheckpoint unless shape and dtype are those of `own`; rows: other than its own number of rows."""
    shape = own.shape if rows is None else (rows, *own.shape[1:])
    plain = isinstance(saved, Tensor) and saved.layout is torch.strided and not saved.is_meta
    if not plain or (saved.shape, saved.dtype) != (shape, own.dtype):
        raise CorruptCheckpoint(f"its {name} is not a tensor of shape {tuple(shape)} and type {own.dtype}")


def _check_ring(bank: MemoryBank) -> None:
    if not all(map(is_integer, (bank.next, bank.written))) or not 0 <= bank.next <= bank.written <= bank.size:
        raise CorruptCheckpoint(f"its bank cannot be at row {bank.next} of {bank.written}")


def _load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    own = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    if not isinstance(saved, dict) or not saved.keys() <= own.keys():
        raise CorruptCheckpoint("its optimiser has other parameters")
    for number, state in saved.items():
        expected = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, AdamW) else {"momentum_buffer"}
        if not isinstance(state, dict) or not state.keys() <= expected:
            raise CorruptCheckpoint("its optimiser is of another kind")
        for name, value in state.items():
            if value is not None:  # SGD without momentum stores None
                like = torch.tensor(0.0) if name == "step" else own[number]
                _check_tensor(value, like, f"optimiser's {name} of weight {number}")
    optimizer.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_scaler(scaler: GradScaler, saved: Any) -> None:
    own = scaler.state_dict()
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        raise CorruptCheckpoint("its loss scaler is of another kind")
    if own:
        scale, steps = saved["scale"], saved["_growth_tracker"]
        if type(scale) is not float or not 0 < scale < math.inf or not is_integer(steps) or steps < 0:
            raise CorruptCheckpoint("its loss scale is not a positive number")
        scaler.load_state_dict(own | {"scale": scale, "_growth_tracker": steps})


def _load_cache(cache: EmbeddingCache, contents: Mapping[str, Any]) -> None:
    snapshot = _require(contents.get(CACHE), ("embedding",))["embedding"]
    _check_tensor(snapshot, cache.embedding, "cache", cache.images)
    cache.load_snapshot(snapshot)
    if CHANGED in contents:
        later = _require(contents[CHANGED], ("index", "embedding"))
        index, embedding = later["index"], later["embedding"]
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.int64:
            raise CorruptCheckpoint("its changed rows have no int64 indices")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < cache.images:
            raise CorruptCheckpoint("its changed rows are outside of the cache")
        _check_tensor(embedding, cache.embedding, "changed rows", len(index))
        cache.load_changes(index, embedding)
