"""A folder of photos: class folders, or an unlabelled pile; train, val and test folders are splits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

from cmsf.data.decoding import SUFFIXES
from cmsf.data.images import FileImages
from cmsf.data.source import SPLIT_ALIASES, Source, SourceSplit, sort_classes
from cmsf.utils.errors import BadInput
from cmsf.utils.progress import track


def open_folder(root: Path) -> Source:
    """Images by path; a folder whose subfolders are all called train, trainval, val or test has splits."""
    found = _files_below(root)
    paths = [path for path in found if path.lower().endswith(SUFFIXES)]
    if not paths:
        raise BadInput(f"no images below {root}, {len(found)} other files; cmsf reads {' '.join(SUFFIXES)}")
    notes = _other_files(found, paths)
    members: dict[str, list[str]] = {}
    first = {path.split("/")[0] for path in paths}
    in_splits = first <= set(SPLIT_ALIASES) and any(SPLIT_ALIASES[name] == "train" for name in first)
    if {"train", "trainval"} <= first and in_splits:
        raise BadInput(f"{root} has both train/ and trainval/, which share images; move one of them away")
    for path in paths:
        members.setdefault(SPLIT_ALIASES[path.split("/")[0]] if in_splits else "train", []).append(path)
    parts = {}
    for split, inside in members.items():
        folders = [path.split("/")[1 if in_splits else 0 : -1] for path in inside]
        names, remark = _class_names(folders, inside[0].split("/")[0] if in_splits else root.name)
        parts[split] = SourceSplit(FileImages(root, inside), names)
        notes += remark
    if not any(parts["train"].names):  # test folders that do not say what the training images are say nothing
        parts = {split: SourceSplit(part.images, [None] * len(part)) for split, part in parts.items()}
    return Source(
        root.resolve().name, parts, sort_classes(name for part in parts.values() for name in part.names), notes
    )


def _files_below(root: Path) -> list[str]:
    """Paths below the root with slashes, sorted; linked folders are followed, hidden files are not."""
    found: list[str] = []
    seen: set[str] = set()
    folders = os.walk(root, followlinks=True, onerror=_refuse)
    for folder, subfolders, files in track(folders, "looking into folders", None):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above or beside it
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith((".", "__MACOSX")))
        below = Path(folder).relative_to(root)
        found += ((below / name).as_posix() for name in files if not name.startswith("."))
    foreign = [path for path in found if not path.isprintable() and _undecodable(path)]
    if foreign:
        raise BadInput(f"{len(foreign)} names below {root} are not UTF-8, as {foreign[0]!r}; rename them")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise BadInput(f"cannot read the folder {error.filename}: {error.strerror}") from None


def _undecodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return True
    return False


def _other_files(found: Sequence[str], images: Sequence[str]) -> tuple[str, ...]:
    others = set(found).difference(images)
    if not others:
        return ()
    kinds = Counter(Path(path).suffix.lower() or "no suffix" for path in others).most_common()
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds[:4]) + (" …" if len(kinds) > 4 else "")
    what = "1 file is no image and was" if len(others) == 1 else f"{len(others)} files are no images and were"
    return (f"{what} left alone: {listed}",)


def _class_names(folders: Sequence[Sequence[str]], where: str) -> tuple[list[str | None], tuple[str, ...]]:
    """Each image's first folder is its class, unless some image has none, or all have the same."""
    loose = sum(not folder for folder in folders)
    names = [normalize("NFC", folder[0]) for folder in folders if folder]  # a Mac spells é with two letters
    if loose or len(set(names)) < 2:
        remark: tuple[str, ...] = ()
        if names:
            why = f"{loose} images lie in {where} itself" if loose else f"{where} has one folder alone, {names[0]}"
            remark = (f"{why}, so folders are not taken as classes",)
        return [None] * len(folders), remark
    return list(names), ()
