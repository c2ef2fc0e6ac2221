"""Checkpoints on the disk: a manifest, written last, with its own hash and the names, sizes and hashes of its parts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cmsf.errors import BadInput
from cmsf.files import HashedFile, atomically, check_plain, own_folder, read_json, sha256_of, write_text
from cmsf.recipe import Resolved

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
            there = check_plain(path)
            if there != self.size:
                raise Damaged(f"its {self.file} has {there} bytes instead of {self.size}")
            if sha256_of(path) != self.sha256:
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
        own_folder(folder)
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
    with atomically(path, needed) as temporary:
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
