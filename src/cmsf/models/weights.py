"""Weights from elsewhere: what a run starts from, and a network filled with weights that must fit."""

from __future__ import annotations

import hashlib
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from cmsf.data.transforms import IMAGENET_MEAN, IMAGENET_STD
from cmsf.models.backbones import SMALL_RESIDUAL, create
from cmsf.utils.errors import BadInput, did_you_mean, first_few
from cmsf.utils.files import atomic_write, check_regular_file, report_write_errors
from cmsf.utils.progress import track
from cmsf.utils.text import error_message, first_line, shorten

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
_NESTED = ("state_dict", "model", "backbone")
_PARALLEL = "module."
_COUNTER = "num_batches_tracked"
_SMALL = 1 << 20
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_SHOWN, _SHOWN_OF_USERS = 2, 4
"""So many names of each kind are in the message of a mismatch, which is a line; more where a user has to find out."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The tensors that a backbone starts with, without the head of a classifier."""

    origin: str
    tensors: dict[str, Tensor]
    note: str = ""
    """What somebody who uses them should know."""

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
        # The counter is younger than many a file and counts for nothing where BatchNorm has a momentum.
        counters = {name: torch.tensor(0) for name in backbone.state_dict() if name.endswith(_COUNTER)}
        remedy = "give weights of this backbone, or a --backbone, --stem and --size that fit"
        load_strict(backbone, counters | self.tensors, self.origin, remedy)


def is_timm_name(init: str) -> bool:
    """Returns whether it is timm's name of weights and no path; what is there on the disk does not matter."""
    if "/" in init:
        return False
    return timm.is_model_pretrained(init) or (timm.is_model(init) and not init.endswith(_FILES))


def load_pretrained(init: str, backbone: str, size: int) -> PretrainedWeights:
    """Loads weights by timm's name, of a file or of a run, for a backbone that sees images of this size."""
    if is_timm_name(init):
        tensors, note = _load_timm(init, backbone, size), _normalization_note(init)
    else:
        tensors, note = _load_path(Path(init)), ""
    return PretrainedWeights(f"--init {init}", _without_head(tensors, backbone, size), note)


def load_strict(module: nn.Module, state: Mapping[str, Any], origin: str | Path, remedy: str = "") -> None:
    """Loads weights that must fit one by one; weights of another network are named in one line."""
    if not isinstance(state, Mapping):
        raise BadInput(f"{origin} is truncated or damaged")
    own = module.state_dict()
    kinds = {
        "missing": [name for name in own if name not in state],
        "too many": [_short_name(name) for name in state if name not in own],
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
    tensors = {name: value for name, value in state.items() if isinstance(own[name], Tensor)}
    odd = [name for name, value in tensors.items() if not _is_plain(value) or value.is_complex()]
    if odd:
        raise BadInput(f"{origin} is truncated or damaged: {odd[0]} holds no real numbers")
    module.load_state_dict(state)


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Reads tensors by name from a .safetensors file that somebody else may have written, or raises BadInput."""
    check_regular_file(file)
    try:
        return safetensors.torch.load_file(file)
    except Exception as error:  # what a damaged or hostile file raises is anybody's guess
        raise BadInput(f"cannot read {file}: {_load_error(error)}") from None


def save_weights(module: nn.Module, file: Path) -> None:
    """Writes a .safetensors file, whole or not at all."""
    tensors = {name: value.contiguous().cpu() for name, value in module.state_dict().items()}
    with report_write_errors(file), atomic_write(file) as temporary:
        temporary.write_bytes(safetensors.torch.save(tensors))  # its own writer does not say why it fails


def _short_name(name: object) -> str:
    return shorten(str(name)[:200], 60)


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


def _normalization_note(name: str) -> str:
    expected = timm.get_pretrained_cfg(name)
    if expected is None or (tuple(expected.mean), tuple(expected.std)) == (IMAGENET_MEAN, IMAGENET_STD):
        return ""
    return (
        f"{name} was trained on images normalised by mean {tuple(expected.mean)} and std {tuple(expected.std)}; "
        "here they are by ImageNet's"
    )


def _load_path(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        if timm.is_model(path.name) or path.suffix in _FILES:
            raise BadInput(f"--init {path} not found; give a file, a run, or timm's name of weights")
        raise BadInput(f"--init {path} not found, and timm has no weights {path.name}; {_nearest(path.name)}")
    if path.is_dir():
        if not (path / "backbone.safetensors").exists():
            raise BadInput(
                f"--init {path} is not a finished run: it has no backbone.safetensors; finish it, or give a file"
            )
        path = path / "backbone.safetensors"
    check_regular_file(path)
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        else:
            _check_archive(path)
            with warnings.catch_warnings():  # of pickles that are none, on their way to being refused
                warnings.simplefilter("ignore")
                state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile file raises is anybody's guess
        raise BadInput(
            f"cannot read --init {path}: {_load_error(error)}; give a .safetensors or a plain state dict"
        ) from None
    return _unwrap_state_dict(state, path)


def _check_archive(path: Path) -> None:
    """Refuses what torch would unpack to the disk, or blow up in memory, before it finds out what it is."""
    with path.open("rb") as file:
        head = file.read(tarfile.BLOCKSIZE)
    if head.startswith(_ZIP):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(item.file_size for item in archive.infolist())
        if unpacked > 2 * path.stat().st_size + _SMALL:  # torch itself does not compress
            raise ValueError(f"its {path.stat().st_size:,} bytes would become {unpacked:,}")
        return
    if not head.startswith(_PICKLE):
        raise ValueError("it is not what torch writes")
    with suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        raise ValueError("it is a tar archive")


def _load_error(error: Exception) -> str:
    """Returns the reason without torch's advice to load what is refused in an unsafe way."""
    if "weights_only" in str(error) or "Weights only" in str(error):
        return "it is damaged, or holds more than tensors"
    return first_line(error)


def _unwrap_state_dict(state: Any, path: Path) -> dict[str, Tensor]:
    """Returns tensors by name, out of what training scripts wrap them in."""
    if isinstance(state, Mapping):
        state = next((state[key] for key in _NESTED if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not state:
        raise BadInput(f"--init {path} holds no weights; give a .safetensors or a plain state dict")
    for name, value in state.items():
        if not isinstance(name, str) or not _is_plain(value):
            kind = type(value).__name__
            raise BadInput(
                f"--init {path} is not a state dict: {_short_name(name)!r} is of type {kind}; save tensors by name"
            )
    parallel = all(name.startswith(_PARALLEL) for name in state)
    return {name.removeprefix(_PARALLEL) if parallel else name: value.detach() for name, value in state.items()}


def _is_plain(value: Any) -> bool:
    """Returns whether it is a dense tensor whose storage holds all of its numbers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _without_head(tensors: dict[str, Tensor], backbone: str, size: int) -> dict[str, Tensor]:
    """Drops what a network has with classes and not without them: our backbones end with their features."""
    if backbone == SMALL_RESIDUAL:
        return tensors
    with torch.device("meta"):  # for the names alone
        whole, bare = (create(backbone, size, num_classes=classes).state_dict() for classes in (1000, 0))
    return {name: value for name, value in tensors.items() if name in bare or name not in whole}
