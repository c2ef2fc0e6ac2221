"""Pack the lists that src/cmsf/data/imagenet holds from their published forms.

    python scripts/make_imagenet_lists.py FOLDER

FOLDER: imagenet1k_hypernyms.tsv (WordNet 3.0: synset, words, parents, is_imagenet1k), cmc_imagenet100.txt (the class
list of Tian et al., Contrastive Multiview Coding), simclr_1percent.txt and simclr_10percent.txt (the file names of
Chen et al., SimCLR).
"""

import csv
import sys
from pathlib import Path

import numpy as np

TO = Path(__file__).parents[1] / "src" / "cmsf" / "data" / "imagenet"


def main(folder: Path) -> None:
    with (folder / "imagenet1k_hypernyms.tsv").open(encoding="utf-8") as file:
        synsets = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    lines = [
        "\t".join((row["synset"], row["words"].split(",")[0].replace("_", " "), row["parents"], row["is_imagenet1k"]))
        for row in synsets
    ]
    (TO / "wordnet.tsv").write_text("\n".join(["synset\tword\tparents\tis_class", *lines]) + "\n", encoding="utf-8")

    hundred = sorted((folder / "cmc_imagenet100.txt").read_text().split())
    (TO / "imagenet-100.txt").write_text("\n".join(hundred) + "\n")

    names = {share: (folder / f"simclr_{share}percent.txt").read_text().split() for share in (1, 10)}
    one = set(names[1])
    assert one <= set(names[10])
    pairs = sorted((name[:9], int(name[10:-5]), name in one) for name in names[10])
    wnids = sorted({wnid for wnid, _, _ in pairs})
    np.savez_compressed(
        TO / "simclr.npz",
        wnid=np.array(wnids),
        of=np.array([wnids.index(wnid) for wnid, _, _ in pairs], np.uint16),
        number=np.array([number for _, number, _ in pairs], np.uint32),
        one_percent=np.array([small for _, _, small in pairs]),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
