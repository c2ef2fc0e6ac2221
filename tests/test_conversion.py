"""Weights under other names: a network with them computes what their own network does, or they are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from cmsf.models.backbones import make_backbone
from cmsf.models.weights import PretrainedWeights, load_pretrained
from cmsf.utils.errors import BadInput

State = dict[str, Tensor]
VIT, VIT_OF_PATCH_14, RESNET, CONVNET = "test_vit", "vit_small_patch14_reg4_dinov2", "resnet18", "test_efficientnet"
SMALL = "small-residual"


@torch.no_grad()
def drawn(network: nn.Module, seed: int = 7) -> nn.Module:
    """The network with numbers of which none is as it begins, so that each of them tells."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if value.is_floating_point():
            value.normal_(0, 0.1, generator=generator)
        if name.endswith("running_var"):
            value.abs_().add_(0.5)
    return network.eval()


def network_of(name: str, size: int = 32, seed: int = 7) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return drawn(make_backbone(name, size=size), seed)


def state_of(name: str, size: int = 32) -> State:
    return dict(network_of(name, size).state_dict())


def save(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def loaded(init: Path, name: str, size: int = 32, **options: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """A network with the weights in it, and what is said of them."""
    before = torch.random.get_rng_state()
    start = load_pretrained(str(init), name, size, **options)
    assert torch.equal(torch.random.get_rng_state(), before)
    network = network_of(name, size, seed=8)
    start.load_into(network)
    return network, start.notes


@torch.no_grad()
def assert_same_features(one: nn.Module, other: nn.Module, size: int = 32) -> None:
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(one(images), other(images), rtol=1e-4, atol=1e-5)


def renamed(state: State, *rules: tuple[str, str]) -> State:
    names: dict[str, str] = {}
    for name in state:
        names[name] = name
        for pattern, replacement in rules:
            names[name] = re.sub(pattern, replacement, names[name])
    return {names[name]: value for name, value in state.items()}


def hugging_face_vit(state: State) -> State:
    """What transformers calls the tensors of a ViT or DINOv2, with query, key and value apart."""
    apart: State = {}
    for name, value in state.items():
        if ".attn.qkv." in name:
            for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                apart[name.replace("attn.qkv", f"attention.attention.{part}")] = third.clone()
        else:
            apart[name] = value
    return renamed(
        apart,
        (r"^pos_embed", "embeddings.position_embeddings"),
        (r"^(cls_token|mask_token|register_tokens)", r"embeddings.\1"),
        (r"^patch_embed.proj", "embeddings.patch_embeddings.projection"),
        (r"^blocks", "encoder.layer"),
        (r"attn.proj", "attention.output.dense"),
        (r"ls(\d).gamma", r"layer_scale\1.lambda1"),
        (r"^norm\.", "layernorm."),
    )


def plain_vit(state: State) -> State:
    """What transformers calls the rest of a ViT; DINOv2 has timm's names for these."""
    return renamed(
        state,
        (r"norm1", "layernorm_before"),
        (r"norm2", "layernorm_after"),
        (r"mlp.fc1", "intermediate.dense"),
        (r"mlp.fc2", "output.dense"),
    )


def metas_dinov2(state: State) -> State:
    """The state dict of Meta's release: register tokens, a mask token, and a position of the class token of its own."""
    old = {name: value for name, value in state.items() if name not in ("reg_token", "cls_token", "pos_embed")}
    first = torch.randn(1, 1, state["pos_embed"].shape[2])
    old["register_tokens"], old["mask_token"] = state["reg_token"], torch.zeros(1, state["pos_embed"].shape[2])
    old["cls_token"], old["pos_embed"] = state["cls_token"] - first, torch.cat([first, state["pos_embed"]], 1)
    return old


def metas_dinov3(state: State) -> State:
    """The state dict of Meta's release, with all that timm computes or leaves out."""
    old = renamed(state, (r"gamma_(\d)", r"ls\1.gamma"), (r"^reg_token", "storage_tokens"))
    width = state["cls_token"].shape[-1]
    old |= {"mask_token": torch.zeros(1, width), "rope_embed.periods": torch.ones(16)}
    biases = {f"blocks.{block}.attn.qkv.bias": torch.zeros(3 * width) for block in range(12)}
    return old | biases | {f"{name}_mask": value for name, value in biases.items()}


def hugging_face_resnet(state: State) -> State:
    def shifted(match: re.Match[str]) -> str:
        stage, block, kind, number = match.groups()
        part = "convolution" if kind == "conv" else "normalization"
        return f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}.layer.{int(number) - 1}.{part}."

    def shortcut(match: re.Match[str]) -> str:
        part = ("convolution", "normalization")[int(match[3])]
        return f"resnet.encoder.stages.{int(match[1]) - 1}.layers.{match[2]}.shortcut.{part}."

    names = {name: re.sub(r"^layer(\d)\.(\d)\.(conv|bn)(\d)\.", shifted, name) for name in state}
    names = {name: re.sub(r"^layer(\d)\.(\d)\.downsample\.(\d)\.", shortcut, new) for name, new in names.items()}
    stem = {"conv1.": "resnet.embedder.embedder.convolution.", "bn1.": "resnet.embedder.embedder.normalization."}
    for old, new in stem.items():
        names = {name: re.sub(f"^{re.escape(old)}", new, known) for name, known in names.items()}
    return {names[name]: value for name, value in state.items()} | {"classifier.1.weight": torch.zeros(10, 512)}


@pytest.mark.parametrize(
    ("name", "size", "convert"),
    [
        (VIT, 32, lambda state: plain_vit(hugging_face_vit(state))),
        (VIT, 32, lambda state: {f"vit.{name}": value for name, value in plain_vit(hugging_face_vit(state)).items()}),
        (VIT_OF_PATCH_14, 28, metas_dinov2),
        (VIT_OF_PATCH_14, 28, lambda state: hugging_face_vit(metas_dinov2(state))),
        (VIT, 32, lambda state: hugging_face_vit(state | {"mask_token": torch.zeros(1, 64)})),
        ("vit_small_patch16_dinov3", 32, metas_dinov3),
        (RESNET, 32, hugging_face_resnet),
    ],
    ids=["ViT", "ViT with a head", "Meta's DINOv2", "DINOv2", "DINOv2 without registers", "Meta's DINOv3", "ResNet"],
)
def test_the_names_of_other_projects_are_known(
    name: str, size: int, convert: Callable[[State], State], tmp_path: Path
) -> None:
    network = network_of(name, size)
    other, _ = loaded(save(convert(dict(network.state_dict())), tmp_path), name, size)
    assert_same_features(other, network, size)


def test_torchvisions_vit_computes_the_same_under_timms_name(tmp_path: Path) -> None:
    torchvisions = drawn(VisionTransformer(32, 16, num_layers=6, num_heads=2, hidden_dim=64, mlp_dim=192))
    network, notes = loaded(save(torchvisions.state_dict(), tmp_path), VIT)
    assert notes == ("weights.pt: 2 tensors beside the backbone left out (heads.head.weight, heads.head.bias)",)
    torchvisions.heads = nn.Identity()
    assert_same_features(network, torchvisions)


@pytest.mark.parametrize(
    "prefix", ["module.", "backbone.", "teacher.backbone.", "module.pre.", "module.model.encoder.", "student."]
)
@pytest.mark.parametrize("name", [SMALL, RESNET])
def test_whatever_stands_before_the_names_is_stripped(prefix: str, name: str, tmp_path: Path) -> None:
    network = network_of(name)
    state = {f"{prefix}{each}": value for each, value in network.state_dict().items()}
    other, notes = loaded(save(state, tmp_path), name)
    assert_same_features(other, network)
    assert notes == (f"weights.pt: taken from below {prefix}",)
    plain = PretrainedWeights("", dict(network.state_dict()))
    assert load_pretrained(str(tmp_path / "weights.pt"), name, 32).sha256 == plain.sha256


@pytest.mark.parametrize("wrappers", [("state_dict",), ("teacher",), ("params",), ("model", "state_dict", "backbone")])
def test_dictionaries_around_the_weights_are_opened(wrappers: tuple[str, ...], tmp_path: Path) -> None:
    network = network_of(SMALL)
    state: dict[str, Any] = dict(network.state_dict())
    for wrapper in wrappers:
        state = {wrapper: state, "epoch": 3}
    assert_same_features(loaded(save(state, tmp_path), SMALL)[0], network)


def test_of_a_teacher_and_its_student_the_teacher_is_taken_and_both_heads_left_out(tmp_path: Path) -> None:
    teacher, student = network_of(RESNET), network_of(RESNET, seed=9)
    state = {f"student.backbone.{name}": value for name, value in student.state_dict().items()}
    state |= {f"teacher.backbone.{name}": value for name, value in teacher.state_dict().items()}
    state |= {"teacher.dino_head.weight": torch.zeros(3), "student.dino_head.weight": torch.zeros(3)}
    network, (note,) = loaded(save(state, tmp_path), RESNET)
    assert_same_features(network, teacher)
    assert note.startswith("weights.pt: taken from below teacher.backbone.; 122 tensors beside the backbone left out (")


def test_heads_and_projectors_are_left_out_and_named(tmp_path: Path) -> None:
    network = network_of(RESNET)
    state = dict(network.state_dict()) | {"fc.0.weight": torch.zeros(8, 512), "projector.1.bias": torch.zeros(8)}
    other, notes = loaded(save(state, tmp_path), RESNET)
    assert_same_features(other, network)
    assert notes == ("weights.pt: 2 tensors beside the backbone left out (fc.0.weight, projector.1.bias)",)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ("register_tokens", VIT),
        ("norm_pre.weight", VIT),
        ("blocks.6.norm1.weight", VIT),
        ("layer1.2.conv1.weight", RESNET),
        ("conv_head.weight", RESNET),
    ],
)
def test_what_would_change_the_features_is_not_taken_for_a_head(extra: str, name: str, tmp_path: Path) -> None:
    file = save(state_of(name) | {extra: torch.zeros(1, 4, 64)}, tmp_path)
    with pytest.raises(BadInput, match=rf"architecture than the recipe: 1 too many \({re.escape(extra)}\)"):
        loaded(file, name)


def test_nothing_is_dropped_where_a_tensor_is_missing(tmp_path: Path) -> None:
    state = {f"teacher.{name}": value for name, value in state_of(RESNET).items()}
    state |= {"teacher.fc.weight": state.pop("teacher.layer3.0.conv2.weight"), "other.weight": torch.zeros(2)}
    with pytest.raises(BadInput, match=r"1 missing \(layer3\.0\.conv2\.weight\)"):
        loaded(save(state, tmp_path), RESNET)


def test_registers_are_not_lost_in_a_network_that_has_none(tmp_path: Path) -> None:
    file = save(metas_dinov2(state_of(VIT_OF_PATCH_14, 28)), tmp_path)
    with pytest.raises(BadInput, match="is of another architecture than the recipe: "):
        loaded(file, "vit_small_patch14_dinov2", 28)


@pytest.mark.parametrize("convert", [dict, lambda state: plain_vit(hugging_face_vit(state))], ids=["timm", "other"])
def test_position_embeddings_are_resampled_to_another_size_and_the_run_says_so(
    convert: Callable[[State], State], tmp_path: Path
) -> None:
    state = state_of(VIT, 64)
    network, notes = loaded(save(convert(state), tmp_path), VIT, 32)
    assert notes == ("weights.pt: position embeddings resampled for this --size (pos_embed (1, 17, 64) to (1, 5, 64))",)
    expected = resample_abs_pos_embed(state["pos_embed"], [2, 2])
    assert torch.equal(network.state_dict()["pos_embed"], expected)
    assert torch.equal(network.state_dict()["blocks.5.mlp.fc2.weight"], state["blocks.5.mlp.fc2.weight"])


def test_patches_of_another_size_are_refused_and_not_resampled(tmp_path: Path) -> None:
    state = state_of(VIT)
    state["patch_embed.proj.weight"] = torch.zeros(64, 3, 8, 8)
    with pytest.raises(BadInput, match=r"1 of another shape \(patch_embed\.proj\.weight \(64, 3, 8, 8\) instead of"):
        loaded(save(state, tmp_path), VIT)


def numbered(state: State, *, counters: bool = True) -> State:
    """The tensors under names that mean nothing."""
    kept = [value for value in state.values() if counters or value.ndim]
    return {f"layers.{number}": value for number, value in enumerate(kept)}


@pytest.mark.parametrize("counters", [True, False])
@pytest.mark.parametrize("name", [SMALL, CONVNET, VIT])
def test_tensors_are_taken_in_order_on_request(name: str, counters: bool, tmp_path: Path) -> None:
    network = network_of(name)
    file = save(numbered(dict(network.state_dict()), counters=counters), tmp_path)
    with pytest.raises(BadInput, match=r"fit in order and shape: if they are of this backbone, add --init-by-order$"):
        loaded(file, name)
    other, notes = loaded(file, name, by_order=True)
    assert_same_features(other, network)
    assert notes == ()


def test_a_head_at_the_end_is_left_out_of_an_order(tmp_path: Path) -> None:
    whole = drawn(timm.create_model(CONVNET))
    state = renamed(whole.state_dict(), (r"^conv_stem", "_stem"), (r"^blocks", "_blocks"), (r"^classifier", "_fc"))
    other, notes = loaded(save(state, tmp_path), CONVNET, by_order=True)
    assert_same_features(other, network_with(whole.state_dict()))
    assert notes == ("weights.pt: 2 tensors beside the backbone left out (_fc.weight, _fc.bias)",)


def network_with(state: State) -> nn.Module:
    network = make_backbone(CONVNET)
    network.load_state_dict({name: value for name, value in state.items() if not name.startswith("classifier")})
    return network.eval()


def without_last(state: State) -> State:
    return dict(list(state.items())[:-1])


def with_a_block(state: State) -> State:
    return state | {f"x.blocks.6.{number}": torch.zeros(64, 64) for number in range(3)}


def with_swapped_statistics(state: State) -> State:
    names = {"bias": "running_mean", "running_mean": "bias"}
    kinds = {name: name.rpartition(".") for name in state}
    return {f"{path}.{names.get(kind, kind)}": state[name] for name, (path, _, kind) in kinds.items()}


@pytest.mark.parametrize(
    ("spoil", "name", "message"),
    [
        (without_last, VIT, r"it ends after 77 of 78 tensors, before the backbone's norm\.bias"),
        (lambda s: s | {"x.cls_token": torch.zeros(2)}, VIT, r"x\.cls_token \(2,\) stands where the backbone has cls_"),
        (with_a_block, VIT, r"x\.blocks\.6\.0 follows on the backbone's last, norm\.bias, and is not of a head"),
        (lambda s: s | {"y.norm.weight": torch.zeros(64)}, VIT, r"y\.norm\.weight follows on the backbone's last"),
        (
            with_swapped_statistics,
            SMALL,
            r"x\.stem\.1\.running_mean \(16,\) stands where the backbone has stem\.1\.bias",
        ),
    ],
)
def test_an_order_that_does_not_fit_is_refused_with_the_first_names(
    spoil: Callable[[State], State], name: str, message: str, tmp_path: Path
) -> None:
    state = spoil({f"x.{each}": value for each, value in state_of(name).items()})
    with pytest.raises(BadInput, match=f"does not fit in order: {message}"):
        loaded(save(state, tmp_path), name, by_order=True)


def test_a_file_that_sorts_its_tensors_has_no_order(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(numbered(state_of(VIT)), file)
    with pytest.raises(
        BadInput, match=r"keeps no order, as \.safetensors sorts its tensors; leave --init-by-order out"
    ):
        loaded(file, VIT, by_order=True)
    with pytest.raises(BadInput, match=r"a --backbone, --stem and --size that fit$"):
        loaded(file, VIT)


def test_order_is_refused_of_a_name(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"--init-by-order is for a file of weights, and resnet18 is timm's name of some"
    ):
        load_pretrained(RESNET, RESNET, 32, by_order=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted_and_the_run_says_so(dtype: torch.dtype, tmp_path: Path) -> None:
    half = {name: value.to(dtype) if value.ndim else value for name, value in state_of(SMALL).items()}
    network, notes = loaded(save(half, tmp_path), SMALL)
    kind = str(dtype).removeprefix("torch.")
    assert notes == (f"weights.pt: its numbers are {kind}, and are converted to the precision of the run",)
    assert network.stem[0].weight.dtype == torch.float32
    assert torch.equal(network.stem[0].weight, half["stem.0.weight"].float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float, tmp_path: Path) -> None:
    state = state_of(SMALL)
    state["blocks.1.body.0.weight"].view(-1)[3:5] = value
    with pytest.raises(
        BadInput, match=r"NaN or inf: 2 of the 4,608 numbers of blocks\.1\.body\.0\.weight; give others"
    ):
        loaded(save(state, tmp_path), SMALL)
    state = state_of(SMALL) | {"fc.weight": torch.full((3, 128), value)}
    loaded(save(state, tmp_path), SMALL)  # which is not used


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    for name in ("weights.pt", "weights.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(BadInput, match=r"cannot read --init .*: it is empty; give a"):
            loaded(tmp_path / name, SMALL)


def test_a_snapshot_of_the_hub_is_a_folder_of_weights(tmp_path: Path) -> None:
    network = network_of(VIT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"is a folder without weights: it has neither a run's backbone\.safetensors"):
        loaded(tmp_path, VIT)
    state = plain_vit(hugging_face_vit(dict(network.state_dict())))
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert_same_features(loaded(tmp_path, VIT)[0], network)


@pytest.mark.parametrize("name", [VIT, "test_convnext", "swin_tiny_patch4_window7_224"])
def test_names_that_timms_filters_do_not_expect_are_refused_in_words(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = {"model": torch.zeros(2, 2), "encoder": torch.zeros(2), "mask_token": torch.zeros(1)}
    strange |= {
        "storage_tokens": torch.zeros(1),
        "pos_embed": torch.zeros(1),
        f"encoder.stages.{'9' * 5000}.layers.0": torch.zeros(1),
    }
    with pytest.raises(BadInput, match="is of another architecture than the recipe"):
        loaded(save(strange, tmp_path), name)
    assert capsys.readouterr().out == ""
