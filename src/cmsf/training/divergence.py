"""Describes a run whose loss or weights are NaN or inf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cmsf.method.learner import Diverged, Learner
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.runs.checkpoint import Checkpoint
from cmsf.runs.folder import RunFolder
from cmsf.utils.files import FullDisk, write_json

_SHOWN = 20


@torch.no_grad()
def _describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the tensors that hold NaN or inf, and the largest norms of the others."""
    floating = {name: value.detach().double() for name, value in tensors.items() if value.is_floating_point()}
    bad = {name: int((~value.isfinite()).sum()) for name, value in floating.items() if not value.isfinite().all()}
    norms = {name: float(value.norm()) for name, value in floating.items() if name not in bad}
    largest = sorted(norms.items(), key=lambda named: -named[1])[:_SHOWN]
    return {
        "not finite": {name: f"{count} of {floating[name].numel()}" for name, count in list(bad.items())[:_SHOWN]},
        "tensors not finite": len(bad),
        "largest norms": dict(largest),
    }


def diagnose(
    error: Diverged, step: int, total: int, recipe: ResolvedRecipe, learner: Learner, latest: Checkpoint | None
) -> tuple[str, dict[str, Any]]:
    """Returns one line for the user, and a record: step, losses, and which tensors are NaN or inf."""
    left = "there is no checkpoint yet" if latest is None else f"the last checkpoint, {latest.path.name}, is kept"
    mixed = " or --precision fp32" if recipe.precision in ("fp16", "bf16") else ""
    remedy = f"train with a lower --lr than {recipe.lr:g}{mixed}, in another --out"
    about = {
        "what": str(error),
        "after step": step,
        "of steps": total,
        "epoch": step * recipe.epochs // total,
        # JSON has no NaN and no infinity: they become text.
        "losses": {name: loss if math.isfinite(loss) else str(loss) for name, loss in error.losses.items()},
        "lr": max(group["lr"] for group in learner.optimizer.param_groups),  # of the heads, where layers have less
        "precision": recipe.precision,
        "loss scale": learner.scaler.get_scale() if learner.scaler.is_enabled() else None,
        **_describe_tensors(learner.encoders.state_dict()),
        "what to do": remedy,
    }
    return f"{error} after step {step} of {total}; {left}; {remedy}", about


def write_diagnosis(folder: RunFolder, about: dict[str, Any], index: Sequence[int], paths: Sequence[str]) -> str:
    """Writes the record with the images of the last batch; returns where, or "" where the disk is full."""
    try:
        about |= {"batch": {"index": list(index), "path": [paths[i] for i in index]}}
        write_json(folder.divergence_file, about, indent=1, ensure_ascii=False)
    except FullDisk:
        return ""
    return f"; {folder.divergence_file} says more"
