"""Everything the next step depends on, in one file that is whole or not there."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cmsf.errors import BadInput
from cmsf.files import atomically
from cmsf.learner import Learner
from cmsf.weights import fill

_KEPT = 2


def save(folder: Path, learner: Learner, progress: Mapping[str, Any]) -> Path:
    """Write the learner and how far it is (`progress` has the step); the newest two checkpoints are kept."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{progress['step']:08d}.pt"
    state = {
        "encoders": learner.encoders.state_dict(),
        "optimiser": learner.optimiser.state_dict(),
        "bank": learner.bank.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "knowledge": learner.knowledge.state_dict(),
        "progress": dict(progress),
    }
    with atomically(path) as temporary:
        torch.save(state, temporary)
    for old in (*_all(folder)[:-_KEPT], *folder.glob(".*.part")):  # the run is locked: what is half there is nobody's
        old.unlink()
    return path


def newest(folder: Path) -> Path | None:
    return next(reversed(_all(folder)), None)


def load(path: Path, learner: Learner, device: torch.device | str) -> dict[str, Any]:
    """Put the learner back where it was; returns the progress that was saved with it."""
    damaged = BadInput(f"{path} is truncated or damaged; remove it to go on from the one before")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        parts = [state[name] for name in ("encoders", "bank", "optimiser", "knowledge", "progress")]
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, IndexError, pickle.UnpicklingError):
        raise damaged from None
    encoders, bank, optimiser, knowledge, progress = parts
    fill(learner.encoders, encoders, path)
    fill(learner.bank, bank, path)
    try:
        learner.optimiser.load_state_dict(optimiser)
        learner.scaler.load_state_dict(state.get("scaler", {}))
        learner.knowledge.load_state_dict(knowledge)
        return {name: progress[name] for name in ("step", "metrics_length", "totals")}
    except (RuntimeError, ValueError, KeyError, TypeError):
        raise damaged from None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))
