"""Variants of the paper: METHOD+VARIANT is the method with one thing changed, METHOD+VARIANT+VARIANT with two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cmsf.recipes.baselines import BASELINES
from cmsf.recipes.methods import OURS

_ALL = (*OURS, *BASELINES)
_BY_CLASS = ("cmsf-sup", "cmsf-sup-all", "cmsf-semi", "cmsf-semi-basic")
_LABELS = (*_BY_CLASS, "xent", "supcon", "proto-nw", "paws", "fixmatch")
_BANK = (*OURS, "supcon", "proto-nw", "moco-v2", "nnclr", "isd")
_TOPS = dict.fromkeys((1, 2, 10, 20), "ablations c") | {1000: "coarse-grained ImageNet"}
_BANKS = {
    "1k": (1_000, "for small data"),
    "4k": (4_000, "for small data"),
    "16k": (16_000, "supplement, ablations b"),
    "128k": (128_000, "supplement, ablations b and c"),
    "256k": (256_000, "Table 1, MSF"),
    "512k": (512_000, "supplement, ablations c"),
    "1m": (1_000_000, "Table 1, MSF"),
}


@dataclass(frozen=True)
class Variant:
    about: str
    changes: dict[str, Any]
    methods: tuple[str, ...] = _ALL
    """The methods that it applies to."""
    at_paper_scale: dict[str, Any] = field(default_factory=dict)
    """Further changes at the scale `imagenet`."""


VARIANTS = {
    **{
        f"noise-{rate}": Variant(
            f"{rate} % of the labels are replaced at random (supplement, noisy setting)",
            {"label_noise": rate / 100},
            _LABELS,
        )
        for rate in (0, 5, 10, 25, 50)
    },
    "coarse": Variant(
        "labels are WordNet's groups of the classes; evaluation has the classes (supplement, coarse-grained ImageNet)",
        {"coarse_labels": "wordnet"},
        _LABELS,
    ),
    **{
        f"top-{k}": Variant(f"pulled to the {k} nearest of the class (supplement, {where})", {"k": k}, _BY_CLASS)
        for k, where in _TOPS.items()
    },
    "top-all": Variant(
        "pulled to the mean of the whole class (supplement, ablations c)", {"k": "all", "keep": "last"}, _BY_CLASS
    ),
    "spread": Variant(
        "predictions of a batch are kept apart (uniformity, weight 0.5); ours, for short runs",
        {"spread": "uniformity", "spread_weight": 0.5},
        tuple(OURS),
    ),
    "nce": Variant(
        "the pull has a contrast with unrelated images of the batch; ours, for short runs",
        {"objective": "constrained-nce"},
        tuple(OURS),
    ),
    "covered": Variant(
        "companions constrain once nine of ten rows have one; ours, for short runs",
        {"companion_coverage": 0.9},
        ("cmsf-self",),
    ),
    "without-target": Variant(
        "the image's own embedding is not among its neighbours or positives (supplement, ablations b and d)",
        {"include_query": False},
        (*OURS, "supcon"),
    ),
    **{
        f"bank-{size}": Variant(f"a bank of {rows:,} rows ({where})", {"bank_size": rows}, _BANK)
        for size, (rows, where) in _BANKS.items()
    },
    "weak-strong": Variant(
        "a weak first view and a strong second one, the paper's own (supplement, ablations b)",
        {"first_view": "weak", "second_view": "strong"},
    ),
    "strong-views": Variant(
        "both views strong (supplement, ablations b)", {"first_view": "strong", "second_view": "strong"}
    ),
    "standard-views": Variant(
        "both views cropped (0.08 to 1) and mirrored alone (supplement, ablations a and b)",
        {"first_view": "weak", "second_view": "weak", "weak_crop": 0.08},
    ),
    "step": Variant(
        "the learning rate falls to a tenth after each third of the epochs (supplement, ablations a)",
        {"lr_schedule": "step"},
    ),
    "support-400": Variant(
        "labelled images of 200 classes, two of each, beside a batch of 256 (semi-supervised table, PAWS)",
        {"support_classes": 200, "support_images": 2, "batch_size": 256},
        ("paws",),
        {"epochs": 100, "lr": 0.4},
    ),
}
