"""A folder of photos: class folders, or an unlabelled pile; train, val and test folders are splits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

from cmsf.data.decoding import SUFFIXES
from cmsf.data.images import FileImages
from cmsf.data.source import SPLIT_ALIASES, Source, SourceSplit, all_classes
from cmsf.utils.constants import ENVIRONMENT_FILE, RECIPE_FILE
from cmsf.utils.errors import BadInput, first_few
from cmsf.utils.progress import track
from cmsf.utils.text import is_encodable


def open_folder(root: Path) -> Source:
    """Opens images by path; a folder whose subfolders are all called train, trainval, val or test has splits."""
    files, runs = _files_below(root)
    paths = [path for path in files if path.lower().endswith(SUFFIXES)]
    if not paths:
        raise BadInput(f"no images below {root}, {len(files)} other files; cmsf reads {' '.join(SUFFIXES)}")
    folders = _split_folders(root, paths)
    notes = _other_files(files, paths) + _joined_folders(folders)
    notes += (f"runs of cmsf are no photos and were left out: {first_few(runs)}",) if runs else ()
    members: dict[str, list[str]] = {}
    for path in paths:
        members.setdefault(folders.get(path.split("/")[0], "train"), []).append(path)
    splits = {}
    for name, inside in members.items():
        below = [path.split("/")[1 if folders else 0 : -1] for path in inside]
        names, note = _class_names(below, inside[0].split("/")[0] if folders else root.name)
        splits[name] = SourceSplit(FileImages(root, inside), names)
        notes += note
    if not any(splits["train"].names):  # test folders that do not say what the training images are say nothing
        splits = {name: replace(split, names=[None] * len(split)) for name, split in splits.items()}
    return Source(root.resolve().name, splits, all_classes(splits), notes)


def _split_folders(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """Returns the split of each folder, in letters of any case, or nothing where the folders are not splits."""
    folders = sorted({path.split("/")[0] for path in paths})
    splits = {folder: SPLIT_ALIASES[folder.lower()] for folder in folders if folder.lower() in SPLIT_ALIASES}
    train = [folder for folder, split in splits.items() if split == "train"]
    if len(splits) < len(folders) or not train:
        return {}
    if len(train) > 1:
        names = " and ".join(f"{folder}/" for folder in sorted(train, key=str.lower))
        raise BadInput(f"{root} has both {names}, which may share images; move one of them away")
    return splits


def _joined_folders(folders: Mapping[str, str]) -> tuple[str, ...]:
    """Says which folders make up one split together."""
    joined = {split: [folder for folder in folders if folders[folder] == split] for split in folders.values()}
    return tuple(f"{' and '.join(inside)} are both {split}" for split, inside in joined.items() if len(inside) > 1)


def _files_below(root: Path) -> tuple[list[str], list[str]]:
    """Returns the paths below the root, sorted, and the folders of runs, whose pictures are no photos.

    Linked folders are followed, hidden files left out.
    """
    paths: list[str] = []
    runs: list[str] = []
    seen: set[str] = set()
    folders = os.walk(root, followlinks=True, onerror=_refuse)
    for folder, subfolders, files in track(folders, "looking into folders", None):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above or beside it
            subfolders.clear()
            continue
        seen.add(real)
        below = Path(folder).relative_to(root)
        if {RECIPE_FILE, ENVIRONMENT_FILE} <= set(files) and below.parts:
            runs.append(below.as_posix())
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__MACOSX")))
        paths += ((below / name).as_posix() for name in files if not name.startswith("."))
    foreign = [path for path in paths if not is_encodable(path)]
    if foreign:
        raise BadInput(f"{len(foreign)} names below {root} are not UTF-8, as {foreign[0]!r}; rename them")
    return sorted(paths), sorted(runs)


def _refuse(error: OSError) -> None:
    raise BadInput(f"cannot read the folder {error.filename}: {error.strerror}") from None


def _other_files(paths: Sequence[str], images: Sequence[str]) -> tuple[str, ...]:
    others = set(paths).difference(images)
    if not others:
        return ()
    kinds = Counter(Path(path).suffix.lower() or "no suffix" for path in others).most_common()
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds[:4]) + (" …" if len(kinds) > 4 else "")
    count = "1 file is not an image and was" if len(others) == 1 else f"{len(others)} files are not images and were"
    return (f"{count} left alone: {listed}",)


def _class_names(folders: Sequence[Sequence[str]], parent: str) -> tuple[list[str | None], tuple[str, ...]]:
    """Takes each image's first folder as its class, unless some image has none or all have the same."""
    loose = sum(not folder for folder in folders)
    names = [normalize("NFC", folder[0]) for folder in folders if folder]  # a Mac spells é with two letters
    if loose or len(set(names)) < 2:
        note: tuple[str, ...] = ()
        if names:
            reason = f"{loose} images lie in {parent} itself" if loose else f"{parent} has one folder alone, {names[0]}"
            note = (f"{reason}, so folders are not taken as classes",)
        return [None] * len(folders), note
    return list(names), ()
