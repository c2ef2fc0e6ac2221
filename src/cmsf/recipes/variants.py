"""What the paper varies: METHOD+VARIANT is the method with one thing changed, and METHOD+VARIANT+VARIANT with two."""

from __future__ import annotations

from typing import Any

_STANDARD = {"first_view": "weak", "second_view": "weak", "weak_crop": 0.08}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"noise-{rate}": (f"{rate} % of the labels are replaced at random (Table 3)", {"label_noise": rate / 100})
        for rate in (5, 10, 25, 50)
    },
    "coarse": (
        "labels are WordNet's groups of the classes; evaluation has the classes (supplement, coarse-grained ImageNet)",
        {"coarse_labels": "wordnet"},
    ),
    **{
        f"top-{k}": (f"pulled to the {k} nearest of the class (supplement, ablations c)", {"k": k})
        for k in (1, 2, 10, 20, 1000)
    },
    "top-all": ("pulled to the mean of the whole class (supplement, ablations c)", {"k": "all"}),
    "without-target": (
        "the image's own embedding is not among its neighbours or positives (supplement, ablations b and d)",
        {"include_query": False},
    ),
    **{
        f"bank-{rows // 1000}k": (f"a bank of {rows:,} rows (supplement, ablations b and c)", {"bank_size": rows})
        for rows in (16_000, 128_000, 256_000, 512_000)
    },
    "weak-strong": (
        "a weak first view and a strong second one, the paper's own (supplement, ablations b)",
        {"first_view": "weak", "second_view": "strong"},
    ),
    "strong-views": ("both views strong (supplement, ablations b)", {"first_view": "strong", "second_view": "strong"}),
    "standard-views": ("both views cropped (0.08 to 1) and mirrored alone (supplement, ablations a and b)", _STANDARD),
    "step": ("the learning rate falls to a tenth after each third of the epochs (supplement, ablations a)",
             {"lr_schedule": "step"}),
    "support-400": (
        "labelled images of 200 classes, two of each, beside a batch of 256 (Table 4, PAWS)",
        {"support_classes": 200, "support_images": 2, "batch_size": 256},
    ),
}  # fmt: skip
"""What each is, and what it sets."""
