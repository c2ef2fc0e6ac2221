"""What is said and written of a run that has diverged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cmsf.analysis.divergence import describe_numbers, say_number
from cmsf.checkpoint import Checkpoint
from cmsf.files import FullDisk
from cmsf.learner import Diverged, Learner
from cmsf.recipe import Resolved
from cmsf.run_folder import RunFolder


def diagnose(
    error: Diverged, step: int, total: int, recipe: Resolved, learner: Learner, kept: Checkpoint | None
) -> tuple[str, dict[str, Any]]:
    """One line, and the whole of it: where it was, and which of its numbers are none."""
    left = "there is no checkpoint yet" if kept is None else f"the checkpoint before it, {kept.path.name}, is kept"
    mixed = " or --precision fp32" if recipe.precision in ("fp16", "bf16") else ""
    remedy = f"train with a lower --lr than {recipe.lr:g}{mixed}, in another --out"
    about = {
        "what": str(error),
        "after step": step,
        "of steps": total,
        "epoch": step * recipe.epochs // total,
        "losses": {name: say_number(loss) for name, loss in error.losses.items()},
        "lr": learner.optimiser.param_groups[0]["lr"],
        "precision": recipe.precision,
        "loss scale": learner.scaler.get_scale() if learner.scaler.is_enabled() else None,
        **describe_numbers(learner.encoders.state_dict()),
        "what to do": remedy,
    }
    return f"{error} after step {step} of {total}; {left}; {remedy}", about


def write_diagnosis(folder: RunFolder, about: dict[str, Any], index: Sequence[int], paths: Sequence[str]) -> str:
    """Write it with the images that were seen last; returns where it is, or nothing where there was no room."""
    try:
        folder.save_divergence(about | {"batch": {"index": list(index), "path": [paths[i] for i in index]}})
    except FullDisk:
        return ""
    return f"; {folder.divergence_file} says more"
