"""Weights from elsewhere: what a run starts from, and a network filled with weights that must fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from cmsf.models.backbones import SMALL_RESIDUAL, Stem, create, make_backbone
from cmsf.models.conversion import COUNTER, Conversion, convert_names, rename_by_order
from cmsf.models.state_dicts import is_plain, read_state_dict, short_name
from cmsf.utils.constants import BACKBONE_FILE, RECIPE_FILE, WEIGHT_FILES
from cmsf.utils.errors import BadInput, did_you_mean, first_few
from cmsf.utils.files import atomic_write, report_write_errors
from cmsf.utils.progress import track
from cmsf.utils.text import error_message

_SNAPSHOT_WEIGHTS = "model.safetensors"
_REMEDY = "give weights of this backbone, or a --backbone, --stem and --size that fit"
_SHOWN, _SHOWN_OF_USERS = 2, 4
"""So many names of each kind are in the message of a mismatch, which is a line; more where a user has to find out."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The tensors that a backbone starts with, without the head of a classifier."""

    origin: str
    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    """What somebody who uses them should know, in lines."""

    @cached_property
    def sha256(self) -> str:
        """Of names and values, in whatever file they came."""
        digest = hashlib.sha256()
        tensors = sorted(self.tensors.items())
        for name, value in track(tensors, "hashing weights", len(tensors)):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def load_into(self, backbone: nn.Module) -> None:
        load_strict(backbone, _with_counters(self.tensors, backbone), self.origin, _REMEDY)


def is_timm_name(init: str) -> bool:
    """Returns whether it is timm's name of weights and no path; what is there on the disk does not matter."""
    if "/" in init:
        return False
    return timm.is_model_pretrained(init) or (timm.is_model(init) and not init.endswith(WEIGHT_FILES))


def load_pretrained(
    init: str, backbone: str, size: int, stem: Stem = "standard", by_order: bool = False
) -> PretrainedWeights:
    """Loads weights by timm's name, of a file or of a run, for a backbone that sees images of this size.

    by_order: take the tensors of a file one after the other, whatever their names.
    """
    origin = f"--init {init}"
    network, head = _network_and_head(backbone, stem, size)
    if is_timm_name(init):
        if by_order:
            raise BadInput(f"--init-by-order is for a file of weights, and {init} is timm's name of some; leave it out")
        tensors = {name: value for name, value in _load_timm(init, backbone, size).items() if name not in head}
        notes = [_size_note(init, tensors, size)]
    else:
        file = find_weights_file(Path(init))
        fitting = _fit(file, origin, network, backbone, head, by_order)
        tensors = fitting.tensors
        notes = [f"{file.name}: {note}" for note in (*fitting.notes, _precision_note(tensors)) if note]
    _check_finite(tensors, origin)
    return PretrainedWeights(origin, tensors, tuple(filter(None, notes)))


def load_strict(module: nn.Module, state: Mapping[str, Any], origin: str | Path, remedy: str = "") -> None:
    """Loads weights that must fit one by one; weights of another network are named in one line."""
    if not isinstance(state, Mapping):
        raise BadInput(f"{origin} is truncated or damaged")
    own = module.state_dict()
    _check_fit(own, state, origin, remedy)
    tensors = {name: value for name, value in state.items() if isinstance(own[name], Tensor)}
    odd = [name for name, value in tensors.items() if not is_plain(value) or value.is_complex()]
    if odd:
        raise BadInput(f"{origin} is truncated or damaged: {odd[0]} holds no real numbers")
    module.load_state_dict(state)


def to_safetensors(module: nn.Module, metadata: dict[str, str] | None = None) -> bytes:
    """Returns what a .safetensors file of a module holds."""
    return safetensors.torch.save(
        {name: value.contiguous().cpu() for name, value in module.state_dict().items()}, metadata
    )


def save_weights(module: nn.Module, file: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a .safetensors file, whole or not at all."""
    content = to_safetensors(module, metadata)
    with report_write_errors(file), atomic_write(file) as temporary:
        temporary.write_bytes(content)  # safetensors' own writer does not say why it fails


def _check_fit(own: Mapping[str, Any], state: Mapping[str, Any], origin: str | Path, remedy: str) -> None:
    kinds = {
        "missing": [name for name in own if name not in state],
        "too many": [short_name(name) for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(value.shape)} instead of {tuple(own[name].shape)}"
            for name, value in state.items()
            if name in own and isinstance(value, Tensor) and value.shape != own[name].shape
        ],
    }
    limit = _SHOWN_OF_USERS if remedy else _SHOWN
    wrong = [f"{len(names)} {kind} ({first_few(names, limit, ', ')})" for kind, names in kinds.items() if names]
    if wrong:
        message = f"{origin} is of another architecture than the recipe: {'; '.join(wrong)}"
        raise BadInput(f"{message}; {remedy}" if remedy else message)


def _fits_by_order(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> bool:
    try:
        rename_by_order(tensors, own, "")
    except BadInput:
        return False
    return True


def _with_counters(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Adds BatchNorm's counters where a file has none."""
    return {name: torch.tensor(0) for name in network.state_dict() if name.endswith(COUNTER)} | {**tensors}


def _network_and_head(backbone: str, stem: Stem, size: int) -> tuple[nn.Module, set[str]]:
    """Returns the backbone without values, and the names that it has with classes and not without them."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = make_backbone(backbone, stem, size)
        if backbone == SMALL_RESIDUAL:
            return network, set()
        whole = create(backbone, size, num_classes=1000)
    return network, whole.state_dict().keys() - network.state_dict().keys()


def _fit(file: Path, origin: str, network: nn.Module, backbone: str, head: set[str], by_order: bool) -> Conversion:
    """Returns the tensors of a file under the network's names, all of them, or says what does not fit."""
    own, tensors, keeps_order = network.state_dict(), read_state_dict(file), file.suffix != ".safetensors"
    if by_order:
        if not keeps_order:
            raise BadInput(
                f"{origin} keeps no order, as .safetensors sorts its tensors; leave --init-by-order out, or give the "
                "state dict that torch wrote"
            )
        return rename_by_order(tensors, own, origin)
    conversion = convert_names(tensors, network, backbone, head)
    if not conversion.fits:
        remedy = _REMEDY
        if keeps_order and _fits_by_order(tensors, own):
            remedy = "its tensors fit in order and shape: if they are of this backbone, add --init-by-order"
        _check_fit(own, _with_counters(conversion.tensors, network), origin, remedy)
    return conversion


def _load_timm(name: str, backbone: str, size: int) -> dict[str, Tensor]:
    architecture = name.split(".")[0]
    if architecture != backbone.split(".")[0]:
        raise BadInput(
            f"--init {name} is for {architecture}, and the backbone is {backbone}; add --backbone {architecture}"
        )
    if not timm.is_model_pretrained(name):
        raise BadInput(f"timm has no weights {name}; {_nearest(name)}")
    try:
        with torch.random.fork_rng(devices=[]):
            # With its head, for without it timm would leave what is missing in the file as it was drawn.
            return dict(create(name, size, pretrained=True).state_dict())
    except Exception as error:  # of the network, the Hub, its cache, the file
        # All of it: what does not fit stands in the lines after the first.
        raise BadInput(
            f"cannot get {name} from the Hugging Face Hub or its cache ({error_message(error, 200)}); give a file"
        ) from None


def _nearest(name: str) -> str:
    return did_you_mean(name, timm.list_pretrained(), "use a name of timm.list_pretrained(), a file or a run")


def _size_note(name: str, tensors: Mapping[str, Tensor], size: int) -> str:
    expected = timm.get_pretrained_cfg(name)
    if expected is None or "pos_embed" not in tensors or expected.input_size[-1] == size:
        return ""
    return f"{name} was trained at {expected.input_size[-1]} px; its position embeddings are resampled for {size} px"


def _precision_note(tensors: Mapping[str, Tensor]) -> str:
    low = {value.dtype for value in tensors.values() if value.is_floating_point() and value.itemsize < 4}
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
    return f"its numbers are {kinds}, and are converted to the precision of the run" if low else ""


def _check_finite(tensors: Mapping[str, Tensor], origin: str) -> None:
    for name, value in tensors.items():
        wrong = value.numel() - int(value.float().isfinite().sum()) if value.is_floating_point() else 0
        if wrong:
            raise BadInput(
                f"{origin} holds NaN or inf: {wrong:,} of the {value.numel():,} numbers of {name}; give others"
            )


def find_weights_file(path: Path) -> Path:
    """Returns the file of weights that a path means: itself, or the one in the folder of a run or of a snapshot."""
    if not path.exists():
        if timm.is_model(path.name) or path.suffix in WEIGHT_FILES:
            raise BadInput(f"--init {path} not found; give a file, a run, or timm's name of weights")
        raise BadInput(f"--init {path} not found, and timm has no weights {path.name}; {_nearest(path.name)}")
    if not path.is_dir():
        return path
    found = next((path / name for name in (BACKBONE_FILE, _SNAPSHOT_WEIGHTS) if (path / name).exists()), None)
    if found is None and (path / RECIPE_FILE).exists():
        raise BadInput(f"--init {path} is not a finished run: it has no {BACKBONE_FILE}; finish it, or give a file")
    if found is None:
        raise BadInput(
            f"--init {path} is a folder without weights: it has neither a run's {BACKBONE_FILE} nor a snapshot's "
            f"{_SNAPSHOT_WEIGHTS}; give a file"
        )
    return found
