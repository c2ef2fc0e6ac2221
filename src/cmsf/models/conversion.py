"""Names of weights: from those of other projects to those of the network, all of them or none."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import timm
import torch
from torch import Tensor, nn

from cmsf.models.state_dicts import short_name
from cmsf.utils.errors import BadInput, first_few

Tensors = Mapping[str, Tensor]
COUNTER = "num_batches_tracked"
"""BatchNorm's, younger than many a file; it counts for nothing where BatchNorm has a momentum."""

_MAX_PREFIXES, _MAX_DEPTH = 32, 6
_BESIDE = re.compile(
    r"_?(fc|heads?|head_\w+|(?!conv|norm|bn)\w+_head|classifier|linear|last_linear|logits|pooler"
    r"|project\w*|predict\w*|proto\w*|decoder\w*)"
)
"""First words of names that stand after a backbone: heads of classifiers, projectors, decoders. Other modules that the
network does not have would change its features if they were there, so they are not dropped."""
_KINDS = {"weight", "bias", "running_mean", "running_var"}


@dataclass(frozen=True)
class Conversion:
    """Tensors under the network's names, and what somebody who uses them should know of how they got there."""

    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    fits: bool = True


def convert_names(file: Tensors, network: nn.Module, backbone: str, head: Collection[str]) -> Conversion:
    """Finds the prefix and the naming under which the file has every tensor of the network.

    Tries them as they are, by the table below, and by timm's own filter for this backbone, which resamples position
    embeddings too. Returns the nearest where none fits. head: names of the classifier on top of the network.
    """
    own = network.state_dict()
    roots = {_root(name) for name in own}
    nearest: tuple[int, dict[str, Tensor]] | None = None
    for prefix in _prefixes(file, own):
        below = {name.removeprefix(prefix): value for name, value in file.items() if name.startswith(prefix)}
        for before, tensors in _namings(below, network, backbone):
            kept = {name: value for name, value in tensors.items() if name in own or name not in head}
            misfits = sum(
                name not in kept or kept[name].shape != value.shape
                for name, value in own.items()
                if not name.endswith(COUNTER)
            )
            extra = [name for name in kept if name not in own]
            if not misfits and all(_root(name) not in roots and _is_beside(name) for name in extra):
                left_out = [name for name in file if not name.startswith(prefix)]
                left_out += [prefix + name for name in tensors if name not in own]
                notes = (_left_out_note(left_out, prefix), _resampled_note(before, tensors))
                fitting = {name: value for name, value in kept.items() if name in own}
                return Conversion(fitting, tuple(filter(None, notes)))
            if nearest is None or misfits < nearest[0]:
                nearest = misfits, kept
    return Conversion(nearest[1] if nearest else dict(file), fits=False)


def rename_by_order(file: Tensors, own: Tensors, origin: str) -> Conversion:
    """Gives the file's tensors the network's names, one after the other; their shapes must agree."""
    theirs, mine = (
        [(name, value) for name, value in state.items() if value.ndim or value.is_floating_point()]  # no counters
        for state in (file, own)
    )
    for (name, value), (wanted, place) in zip(theirs, mine, strict=False):
        if value.shape != place.shape or len({_kind(name), _kind(wanted)} - {""}) > 1:
            found = f"{short_name(name)} {tuple(value.shape)}"
            raise _disorder(origin, f"{found} stands where the backbone has {wanted} {tuple(place.shape)}")
    if len(theirs) < len(mine):
        wanted = mine[len(theirs)][0]
        raise _disorder(origin, f"it ends after {len(theirs)} of {len(mine)} tensors, before the backbone's {wanted}")
    rest = theirs[len(mine) :]
    depth = _shared_depth([name for name, _ in theirs])
    taken = {_root(name, depth) for name, _ in theirs[: len(mine)]}
    if rest and (rest[0][1].ndim < 2 or any(_root(name, depth) in taken for name, _ in rest)):
        after = f"{short_name(rest[0][0])} follows on the backbone's last, {mine[-1][0]}"
        raise _disorder(origin, f"{after}, and is not of a head")
    tensors = {wanted: value for (wanted, _), (_, value) in zip(mine, theirs, strict=False)}
    return Conversion(tensors, tuple(filter(None, [_left_out_note([name for name, _ in rest])])))


def _disorder(origin: str, reason: str) -> BadInput:
    return BadInput(f"{origin} does not fit in order: {reason}; give weights of this backbone")


def _prefixes(file: Tensors, own: Tensors) -> list[str]:
    """Returns what may stand before the names: paths that hold half as many tensors as the network, or more."""
    parts = (name.split(".", _MAX_DEPTH + 1)[:-1] for name in file)
    paths = (".".join(words[:depth]) + "." for words in parts for depth in range(1, min(len(words), _MAX_DEPTH) + 1))
    enough = sum(not name.endswith(COUNTER) for name in own) / 2
    likely = [prefix for prefix, count in Counter(paths).items() if count >= enough]
    return ["", *sorted(likely, key=lambda prefix: "teacher" not in prefix)][:_MAX_PREFIXES]


def _namings(
    tensors: dict[str, Tensor], network: nn.Module, backbone: str
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yields the tensors under their own names, those of the table, and timm's: each with what they were made from."""
    yield tensors, tensors
    renamed = _merge_attention({_rename(name): value for name, value in tensors.items()})
    yield renamed, renamed
    filter_fn = _timm_filter(backbone)
    if filter_fn is not None and _has_own_patches(renamed, network.state_dict()):
        try:
            with redirect_stdout(io.StringIO()):  # eva's prints
                filtered = dict(filter_fn(dict(renamed), network))
        except Exception:  # what it raises for names that it was not made for is anybody's guess
            return
        yield renamed, filtered


def _timm_filter(backbone: str) -> Callable[..., dict[str, Tensor]] | None:
    """Returns timm's function from other projects' state dicts to those of the backbone."""
    name = backbone.split(".")[0]
    if not timm.is_model(name):
        return None
    module = sys.modules[timm.models.model_entrypoint(name).__module__]
    found: Any = getattr(module, "checkpoint_filter_fn", None)
    return found if callable(found) else None


def _has_own_patches(tensors: Tensors, own: Tensors) -> bool:
    """Returns whether patches are as large as the network's; timm would interpolate others to what they never were."""
    kernels = {value.shape[2:] for value in own.values() if value.ndim == 4}
    patches = [
        value.shape[2:]
        for name, value in tensors.items()
        if value.ndim == 4 and ("patch" in name or name.endswith("conv1.weight"))
    ]
    return kernels.issuperset(patches)


_STAGE = r"^encoder\.stages\.(\d{1,3})\.layers\.(\d{1,3})\."
_TABLE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Hugging Face's ViT and DINOv2
    (r"^embeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"^layernorm\.", "norm."),
    (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.w12."),
    (r"\.mlp\.weights_out\.", ".mlp.w3."),
    # Hugging Face's ResNet
    (r"^embedder\.embedder\.convolution\.", "conv1."),
    (r"^embedder\.embedder\.normalization\.", "bn1."),
    (_STAGE + r"shortcut\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.0."),
    (_STAGE + r"shortcut\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.downsample.1."),
    (_STAGE + r"layer\.(\d{1,3})\.convolution\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.conv{int(m[3]) + 1}."),
    (_STAGE + r"layer\.(\d{1,3})\.normalization\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.bn{int(m[3]) + 1}."),
    # torchvision's ViT
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"^(blocks\.\d+)\.mlp\.(?:0|linear_1)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.mlp\.(?:3|linear_2)\.", r"\1.mlp.fc2."),
)
"""Patterns and what replaces them, one after the other; what is below depends on what is above."""
_RULES = tuple((re.compile(pattern), replacement) for pattern, replacement in _TABLE)


def _rename(name: str) -> str:
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name


def _merge_attention(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins query, key and value, which timm has in one tensor."""
    merged = dict(tensors)
    for name in tensors:
        if ".attn.query." not in name:
            continue
        parts = [name.replace(".attn.query.", f".attn.{part}.") for part in ("query", "key", "value")]
        if all(part in tensors and tensors[part].shape == tensors[name].shape for part in parts) and tensors[name].ndim:
            merged[name.replace(".attn.query.", ".attn.qkv.")] = torch.cat([merged.pop(part) for part in parts])
    return merged


def _is_beside(name: str) -> bool:
    """Returns whether it is of a module after the backbone; a parameter without a module is a token of the network."""
    return "." in name and _BESIDE.fullmatch(_root(name)) is not None


def _root(name: str, depth: int = 0) -> str:
    return ".".join(name.split(".")[: depth + 1])


def _shared_depth(names: list[str]) -> int:
    """Returns how many of their first words all names have in common."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, columns))


def _kind(name: str) -> str:
    kind = name.rpartition(".")[2]
    return kind if kind in _KINDS else ""


def _left_out_note(names: list[str], prefix: str = "") -> str:
    below = f"taken from below {short_name(prefix)}" if prefix else ""
    shown = first_few([short_name(name) for name in names], 2, ", ")
    rest = f"{len(names)} tensor{'s' * (len(names) > 1)} beside the backbone left out ({shown})" if names else ""
    return "; ".join(filter(None, (below, rest)))


def _resampled_note(before: Tensors, after: Tensors) -> str:
    """Says which position embeddings timm has interpolated; one that merely lost its first rows has not changed."""
    changed = [
        f"{name} {tuple(before[name].shape)} to {tuple(value.shape)}"
        for name, value in after.items()
        if "pos" in name and name in before and not value.equal(_end(before[name], value))
    ]
    return f"position embeddings resampled for this --size ({first_few(changed, 1, ', ')})" if changed else ""


def _end(value: Tensor, like: Tensor) -> Tensor:
    """Returns the last numbers of a tensor in another one's shape, or the tensor itself if it has too few."""
    return value.flatten()[-like.numel() :].view_as(like) if value.numel() >= like.numel() else value
