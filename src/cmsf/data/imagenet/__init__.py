"""What is known of ImageNet's classes and files by their names: coarse groups, ImageNet-100, SimCLR's shares."""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from importlib.resources import files

import numpy as np

from cmsf.data.source import disambiguate

_HERE = files("cmsf.data.imagenet")


def imagenet_100() -> frozenset[str]:
    """Returns the wnids of ImageNet-100."""
    return frozenset((_HERE / "imagenet-100.txt").read_text().split())


def simclr_files(per_cent: int) -> frozenset[str]:
    """Returns the file names of SimCLR's 1 % or 10 % of labels."""
    with (_HERE / "simclr.npz").open("rb") as file:
        packed = dict(np.load(file, allow_pickle=False))
    rows = packed["one_percent"] if per_cent == 1 else np.ones(len(packed["of"]), bool)
    wnid, number = packed["wnid"][packed["of"][rows]], packed["number"][rows]
    return frozenset(f"{name}_{count}.JPEG" for name, count in zip(wnid.tolist(), number.tolist(), strict=True))


@cache
def coarse_groups() -> dict[str, str]:
    """Returns each of the 1,000 wnids with the name of its coarse group, of which there are 93.

    The paper merges every class into its WordNet parent, and any class with its ancestors that are classes too. Of
    several parents we take the one nearest to the root; ancestors are those of the class and of its parent along all
    paths; what is joined with the same is joined (docs/decisions/13). A group is called by what all its classes are.
    """
    words, parents, classes = _wordnet()

    @cache
    def depth(synset: str) -> int:
        return 1 + min(map(depth, parents[synset])) if parents[synset] else 0

    @cache
    def lineage(synset: str) -> frozenset[str]:
        """Returns a synset and all its ancestors."""
        return frozenset([synset]).union(*map(lineage, parents[synset]))

    merged = {name: min(parents[name], key=lambda synset: (depth(synset), synset)) for name in classes}
    superclasses = set(merged.values())
    joined: dict[str, str] = {}

    def find(synset: str) -> str:
        while joined.setdefault(synset, synset) != synset:
            synset = joined[synset]
        return synset

    for name, parent in merged.items():
        for ancestor in ((lineage(name) | lineage(parent)) & superclasses) | {parent}:
            joined[find(name)] = find(ancestor)

    members = defaultdict(list)
    for name in classes:
        members[find(name)].append(name)
    groups = list(members.values())
    common = [frozenset.intersection(*(lineage(merged[name]) for name in group)) for group in groups]
    titles = disambiguate([words[max(shared, key=lambda synset: (depth(synset), synset))] for shared in common])
    return {name: title for title, group in zip(titles, groups, strict=True) for name in group}


def _wordnet() -> tuple[dict[str, str], dict[str, list[str]], list[str]]:
    """Returns words, parents, and which synsets are classes."""
    text = (_HERE / "wordnet.tsv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    parents = {row["synset"]: [parent for parent in row["parents"].split(",") if parent] for row in rows}
    words = {row["synset"]: row["word"] for row in rows}
    return words, parents, [row["synset"] for row in rows if row["is_class"] == "1"]
