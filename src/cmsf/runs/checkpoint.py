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
from torch.optim import Optimizer

from cmsf.method.bank import EmbeddingCache, MemoryBank
from cmsf.method.learner import Learner
from cmsf.models.weights import fill
from cmsf.recipes.recipe import Resolved
from cmsf.utils.errors import BadInput
from cmsf.utils.files import (
    HashedFile,
    atomic_write,
    check_regular_file,
    file_sha256,
    make_folder,
    read_json,
    write_text,
)

_KEPT = 3
_FORMAT = 1


class Damaged(BadInput):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Part:
    """A file of tensors beside the manifest."""

    file: str
    size: int
    sha256: str

    def content(self, folder: Path) -> Any:
        """What is in it, if it is to the last byte what was written."""
        path = folder / self.file
        try:
            if not path.exists():
                raise Damaged(f"its {self.file} is missing")
            there = check_regular_file(path)
            if there != self.size:
                raise Damaged(f"its {self.file} has {there} bytes instead of {self.size}")
            if file_sha256(path) != self.sha256:
                raise Damaged(f"its {self.file} is not what was written (another sha256)")
            return torch.load(path, map_location="cpu", weights_only=True)
        except Damaged:
            raise
        except Exception as error:  # what a damaged or hostile file raises is anybody's guess
            raise Damaged(f"its {self.file} cannot be read ({type(error).__name__})") from None


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says."""

    path: Path
    step: int
    recipe: Resolved
    parts: dict[str, Part]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        damaged = Damaged("it is no manifest of a checkpoint")
        try:
            found = read_json(path)
        except BadInput:
            raise damaged from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("parts"), dict):
            raise damaged
        if found.get("sha256") != sha256_of_manifest(found):
            raise Damaged("its manifest is not what was written (another sha256)")
        try:
            parts = {name: Part(**about) for name, about in found["parts"].items()}
            kinds = {(type(part.file), type(part.size), type(part.sha256)) for part in parts.values()}
        except TypeError:
            raise damaged from None
        if type(found.get("step")) is not int or kinds != {(str, int, str)}:
            raise damaged
        if any(Path(part.file).name != part.file for part in parts.values()):  # nobody sends us elsewhere
            raise damaged
        try:
            recipe = Resolved.of(found.get("recipe"), "its recipe")
        except BadInput as error:
            raise Damaged(str(error)) from None
        return cls(path, found["step"], recipe, parts)

    def contents(self) -> dict[str, Any]:
        """What is in every part, all of them checked first."""
        return {name: part.content(self.path.parent) for name, part in self.parts.items()}


def write(
    folder: Path, step: int, recipe: Resolved, contents: Mapping[str, Any], older: Mapping[str, Part]
) -> Checkpoint:
    """Write a checkpoint of these parts and of `older` ones that are on the disk already; then tidy up.

    Until its manifest is there it does not exist, and the one before it is the newest. Where it cannot be written,
    nothing of it stays.
    """
    manifest, needed = folder / f"{_stem(step)}.json", sum(_bytes_of(content) for content in contents.values())
    try:
        make_folder(folder)
        parts = {**older}
        for name, content in contents.items():
            parts[name] = _write_part(folder / f"{_stem(step)}-{name}.pt", content, needed)
        about: dict[str, Any] = {
            "format": _FORMAT,
            "step": step,
            "parts": {name: asdict(part) for name, part in parts.items()},
        }
        about["recipe"] = asdict(recipe)
        write_text(manifest, json.dumps(about | {"sha256": sha256_of_manifest(about)}, indent=1) + "\n")
        _tidy(folder, step)
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
    """Of what it says but for this very hash, in whatever order and with whatever spaces."""
    said = json.dumps({name: value for name, value in about.items() if name != "sha256"}, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def manifests(folder: Path) -> list[Path]:
    """Of all checkpoints, oldest first; a folder that cannot be read is not taken for one without any."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadInput(f"cannot read {folder}: {error.strerror}; make it readable") from None
    return sorted(folder / name for name in names if fnmatchcase(name, "step-*.json"))


def newest(folder: Path) -> Path | None:
    return next(reversed(manifests(folder)), None)


def _stem(step: int) -> str:
    return f"step-{step:08d}"


def _write_part(path: Path, content: Any, needed: int) -> Part:
    with atomic_write(path, needed) as temporary:
        file = HashedFile(temporary)
        torch.save(content, file)  # type: ignore[arg-type]  # it writes, and that is all it is asked for
        sha256 = file.finish()
    return Part(path.name, file.size, sha256)


def _tidy(folder: Path, step: int) -> None:
    """Keep the newest few checkpoints and what they name. Steps after this one are of a time that did not work out."""
    all_of_them = manifests(folder)
    kept = [path for path in all_of_them if path.stem <= _stem(step)][-_KEPT:]
    named = {path.name for path in kept}
    for path in kept:
        with suppress(BadInput):
            named |= {part.file for part in Checkpoint.read(path).parts.values()}
    # The run is locked: what is half there is nobody's.
    for path in (*all_of_them, *folder.glob("step-*.pt"), *folder.glob(".step-*.part")):
        if path.name not in named:
            path.unlink(missing_ok=True)


def _bytes_of(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(map(_bytes_of, content.values()))
    return sum(map(_bytes_of, content)) if isinstance(content, list | tuple) else 0


STATE, CACHE, CHANGED = "state", "cache", "changed"
"""The parts of a checkpoint: all but the cache; the cache; what of it has changed since an older one was written."""
PROGRESS = "progress"


def copy_state(learner: Learner) -> dict[str, Any]:
    """What does not grow with the data, as it is now, whatever the learner does next."""
    state = {
        "encoders": learner.encoders.state_dict(),
        "optimiser": learner.optimiser.state_dict()["state"],  # what its groups say, the recipe says
        "bank": learner.bank.whole_state(),
        "scaler": learner.scaler.state_dict(),
        "knowledge": learner.knowledge.state_dict(),
    }
    copied: dict[str, Any] = _copied(state)
    return copied


def copy_cache(cache: EmbeddingCache) -> dict[str, Tensor | None]:
    """All of it; from now on, what changes is counted anew."""
    return {"embedding": cache.whole()}


def copy_changes(cache: EmbeddingCache) -> dict[str, Tensor]:
    """What was written since all of it was copied."""
    index, embedding = cache.changes()
    return {"index": index, "embedding": embedding}


def put_back(learner: Learner, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the learner where it was when these parts were copied; returns the progress that was saved with them.

    What does not fit is Damaged, and leaves a learner that has to be filled again.
    """
    state = _entries(contents.get(STATE), ("encoders", "optimiser", "bank", "scaler", "knowledge", PROGRESS))
    try:
        bank = _entries(state["bank"], ("index",))
        _check_tensor(bank["index"], learner.bank.index, "bank index")  # before a share is taken of it
        for name, module, found in (
            ("encoders", learner.encoders, state["encoders"]),
            ("bank", learner.bank, learner.bank.own_share(bank)),
        ):
            fill(module, found, "it")
            _check_like(found, module.state_dict(), name)
        _check_ring(learner.bank)
        _put_optimiser(learner.optimiser, state["optimiser"])
        _put_scaler(learner.scaler, state["scaler"])
        _check_like(state["knowledge"], learner.knowledge.state_dict(), "knowledge")
        learner.knowledge.load_state_dict(state["knowledge"])
        if learner.knowledge.apart is not None:
            _put_cache(learner.knowledge.apart, contents)
    except Damaged:
        raise
    except BadInput as error:
        raise Damaged(str(error)) from None
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Damaged(f"what it holds does not fit ({type(error).__name__})") from None
    progress: dict[str, Any] = _entries(state[PROGRESS], ())
    return progress


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _entries(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(found, dict) or not set(names) <= found.keys():
        raise Damaged(f"it lacks what a checkpoint has, such as {names[0] if names else PROGRESS}")
    return found


def _check_like(found: Any, own: Mapping[str, Any], where: str) -> None:
    """Refuse other names, shapes and types of tensors than these."""
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise Damaged(f"its {where} has other entries")
    for name, value in own.items():
        if isinstance(value, Tensor):
            _check_tensor(found[name], value, f"{where} {name}")


def _check_tensor(found: Any, own: Tensor, where: str) -> None:
    plain = isinstance(found, Tensor) and found.layout is torch.strided and not found.is_meta
    if not plain or (found.shape, found.dtype) != (own.shape, own.dtype):
        raise Damaged(f"its {where} is no tensor of shape {tuple(own.shape)} and type {own.dtype}")


def _check_ring(bank: MemoryBank) -> None:
    numbers = (bank.next, bank.written)
    if not all(type(number) is int for number in numbers) or not 0 <= bank.next <= bank.written <= bank.size:
        raise Damaged(f"its bank cannot be at row {numbers[0]} of {numbers[1]}")


def _put_optimiser(optimiser: Optimizer, found: Any) -> None:
    groups = optimiser.state_dict()["param_groups"]
    parameters = [one for group in optimiser.param_groups for one in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    own = dict(zip(numbers, parameters, strict=True))
    if not isinstance(found, dict) or not found.keys() <= own.keys():
        raise Damaged("its optimiser is of other weights")
    for number, kept in found.items():
        if not isinstance(kept, dict) or not kept.keys() <= {"momentum_buffer"}:
            raise Damaged("its optimiser is of another kind")
        for name, value in kept.items():
            if value is not None:  # so SGD has it without momentum
                _check_tensor(value, own[number], f"optimiser's {name} of weight {number}")
    optimiser.load_state_dict({"state": found, "param_groups": groups})


def _put_scaler(scaler: GradScaler, found: Any) -> None:
    own = scaler.state_dict()
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise Damaged("its loss was scaled in another way")
    if own:
        scale, steps = found["scale"], found["_growth_tracker"]
        if type(scale) is not float or not 0 < scale < math.inf or type(steps) is not int or steps < 0:
            raise Damaged("its loss was scaled by no number")
        scaler.load_state_dict(own | {"scale": scale, "_growth_tracker": steps})


def _put_cache(cache: EmbeddingCache, contents: Mapping[str, Any]) -> None:
    whole = _entries(contents.get(CACHE), ("embedding",))["embedding"]
    _check_rows(whole, cache, cache.images, "cache")
    cache.put_whole(whole)
    if CHANGED in contents:
        later = _entries(contents[CHANGED], ("index", "embedding"))
        index, embedding = later["index"], later["embedding"]
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.int64:
            raise Damaged("its changed rows have no numbers")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < cache.images:
            raise Damaged("its changed rows are outside of the cache")
        _check_rows(embedding, cache, len(index), "changed rows")
        cache.put_changes(index, embedding)


def _check_rows(found: Any, cache: EmbeddingCache, count: int, where: str) -> None:
    own = cache.embedding
    _check_tensor(found, torch.empty(count, own.shape[1], dtype=own.dtype, device="meta"), where)
