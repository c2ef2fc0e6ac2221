"""Everything the next step depends on: copied out of a learner, and put back into one if it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from cmsf.bank import EmbeddingCache, MemoryBank
from cmsf.checkpoint import Damaged
from cmsf.errors import BadInput
from cmsf.learner import Learner
from cmsf.weights import fill

STATE, CACHE, CHANGED = "state", "cache", "changed"
"""The parts of a checkpoint: all but the cache; the cache; what of it has changed since an older one was written."""
PROGRESS = "progress"


def copy_state(learner: Learner) -> dict[str, Any]:
    """What does not grow with the data, as it is now, whatever the learner does next."""
    state = {
        "encoders": learner.encoders.state_dict(),
        "optimiser": learner.optimiser.state_dict()["state"],  # what its groups say, the recipe says
        "bank": learner.bank.whole_state(),
        "scaler": learner.scaler.state_dict(),
        "knowledge": learner.knowledge.state_dict(),
    }
    copied: dict[str, Any] = _copied(state)
    return copied


def copy_cache(cache: EmbeddingCache) -> dict[str, Tensor | None]:
    """All of it; from now on, what changes is counted anew."""
    return {"embedding": cache.whole()}


def copy_changes(cache: EmbeddingCache) -> dict[str, Tensor]:
    """What was written since all of it was copied."""
    index, embedding = cache.changes()
    return {"index": index, "embedding": embedding}


def put_back(learner: Learner, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the learner where it was when these parts were copied; returns the progress that was saved with them.

    What does not fit is Damaged, and leaves a learner that has to be filled again.
    """
    state = _entries(contents.get(STATE), ("encoders", "optimiser", "bank", "scaler", "knowledge", PROGRESS))
    try:
        bank = _entries(state["bank"], ("index",))
        _check_tensor(bank["index"], learner.bank.index, "bank index")  # before a share is taken of it
        for name, module, found in (
            ("encoders", learner.encoders, state["encoders"]),
            ("bank", learner.bank, learner.bank.own_share(bank)),
        ):
            fill(module, found, "it")
            _check_like(found, module.state_dict(), name)
        _check_ring(learner.bank)
        _put_optimiser(learner.optimiser, state["optimiser"])
        _put_scaler(learner.scaler, state["scaler"])
        _check_like(state["knowledge"], learner.knowledge.state_dict(), "knowledge")
        learner.knowledge.load_state_dict(state["knowledge"])
        if learner.knowledge.apart is not None:
            _put_cache(learner.knowledge.apart, contents)
    except Damaged:
        raise
    except BadInput as error:
        raise Damaged(str(error)) from None
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise Damaged(f"what it holds does not fit ({type(error).__name__})") from None
    progress: dict[str, Any] = _entries(state[PROGRESS], ())
    return progress


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _entries(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(found, dict) or not set(names) <= found.keys():
        raise Damaged(f"it lacks what a checkpoint has, such as {names[0] if names else PROGRESS}")
    return found


def _check_like(found: Any, own: Mapping[str, Any], where: str) -> None:
    """Refuse other names, shapes and types of tensors than these."""
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise Damaged(f"its {where} has other entries")
    for name, value in own.items():
        if isinstance(value, Tensor):
            _check_tensor(found[name], value, f"{where} {name}")


def _check_tensor(found: Any, own: Tensor, where: str) -> None:
    plain = isinstance(found, Tensor) and found.layout is torch.strided and not found.is_meta
    if not plain or (found.shape, found.dtype) != (own.shape, own.dtype):
        raise Damaged(f"its {where} is no tensor of shape {tuple(own.shape)} and type {own.dtype}")


def _check_ring(bank: MemoryBank) -> None:
    numbers = (bank.next, bank.written)
    if not all(type(number) is int for number in numbers) or not 0 <= bank.next <= bank.written <= bank.size:
        raise Damaged(f"its bank cannot be at row {numbers[0]} of {numbers[1]}")


def _put_optimiser(optimiser: Optimizer, found: Any) -> None:
    groups = optimiser.state_dict()["param_groups"]
    parameters = [one for group in optimiser.param_groups for one in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    own = dict(zip(numbers, parameters, strict=True))
    if not isinstance(found, dict) or not found.keys() <= own.keys():
        raise Damaged("its optimiser is of other weights")
    for number, kept in found.items():
        if not isinstance(kept, dict) or not kept.keys() <= {"momentum_buffer"}:
            raise Damaged("its optimiser is of another kind")
        for name, value in kept.items():
            if value is not None:  # so SGD has it without momentum
                _check_tensor(value, own[number], f"optimiser's {name} of weight {number}")
    optimiser.load_state_dict({"state": found, "param_groups": groups})


def _put_scaler(scaler: GradScaler, found: Any) -> None:
    own = scaler.state_dict()
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise Damaged("its loss was scaled in another way")
    if own:
        scale, steps = found["scale"], found["_growth_tracker"]
        if type(scale) is not float or not 0 < scale < math.inf or type(steps) is not int or steps < 0:
            raise Damaged("its loss was scaled by no number")
        scaler.load_state_dict(own | {"scale": scale, "_growth_tracker": steps})


def _put_cache(cache: EmbeddingCache, contents: Mapping[str, Any]) -> None:
    whole = _entries(contents.get(CACHE), ("embedding",))["embedding"]
    _check_rows(whole, cache, cache.images, "cache")
    cache.put_whole(whole)
    if CHANGED in contents:
        later = _entries(contents[CHANGED], ("index", "embedding"))
        index, embedding = later["index"], later["embedding"]
        if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.int64:
            raise Damaged("its changed rows have no numbers")
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < cache.images:
            raise Damaged("its changed rows are outside of the cache")
        _check_rows(embedding, cache, len(index), "changed rows")
        cache.put_changes(index, embedding)


def _check_rows(found: Any, cache: EmbeddingCache, count: int, where: str) -> None:
    own = cache.embedding
    _check_tensor(found, torch.empty(count, own.shape[1], dtype=own.dtype, device="meta"), where)
