"""Starting from weights: where they may come from, what is refused, and that a run needs them once."""

import json
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from helpers import noise, put_into_hub_cache, write_npz
from runs import TINY, StopAt, assert_same, assert_same_run
from torch import Tensor

import cmsf
from cmsf.cli import main
from cmsf.method.build import make_encoders, make_loss
from cmsf.models.backbones import make_backbone
from cmsf.models.encoders import Encoders
from cmsf.models.weights import PretrainedWeights, is_timm_name, load_pretrained, load_strict
from cmsf.recipes.recipe import Recipe, ResolvedRecipe
from cmsf.training.resolve import resolve
from cmsf.training.signals import Stopped
from cmsf.utils.errors import BadInput

RESNET, VIT = "resnet10t", "vit_tiny_patch16_224"
PRETRAINED = "resnet10t.c3_in1k"


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


def weights_of(name: str, seed: int = 7, **options: Any) -> dict[str, Tensor]:
    """Of a network that no recipe's seed gives, with BatchNorm statistics that are not those of a fresh one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make_backbone(name) if name == "small-residual" else timm.create_model(name, **options)
        state = network.state_dict()
        for key, value in state.items():
            if "running" in key:
                value.uniform_(0.5, 1.5)
            elif key.endswith("num_batches_tracked"):
                value.fill_(41)
    return {key: value.clone() for key, value in state.items()}


def small_recipe(backbone: str = "small-residual", **changes: Any) -> ResolvedRecipe:
    return resolve(Recipe(backbone=backbone, size=32, epochs=1).changed(changes), noise(30, 6), 32)


def encoders_of(recipe: ResolvedRecipe, start: PretrainedWeights | None = None) -> Encoders:
    return make_encoders(recipe, make_loss(recipe), 3, start)


def started(recipe: ResolvedRecipe, init: str | Path) -> dict[str, Tensor]:
    """The backbone's tensors after starting from there."""
    start = load_pretrained(str(init), recipe.backbone, recipe.size)
    return encoders_of(recipe, start).online.backbone.state_dict()


def save_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    safetensors.torch.save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def save_pickled(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def save_run(state: dict[str, Tensor], folder: Path) -> Path:
    safetensors.torch.save_file(state, folder / "backbone.safetensors")
    return folder


@pytest.mark.parametrize(
    "save",
    [
        save_safetensors,
        save_run,
        save_pickled,
        lambda state, folder: save_pickled({"state_dict": state, "epoch": 90}, folder),
        lambda state, folder: save_pickled({"model": state}, folder),
        lambda state, folder: save_pickled({"backbone": state}, folder),
        lambda state, folder: save_pickled({f"module.{name}": value for name, value in state.items()}, folder),
        lambda state, folder: save_pickled(
            {
                "state_dict": {
                    f"module.{name}": torch.nn.Parameter(v, v.is_floating_point()) for name, v in state.items()
                }
            },
            folder,
        ),
    ],
    ids=["safetensors", "run", "pt", "state_dict", "model", "backbone", "module.", "nested module."],
)
def test_weights_arrive_to_the_last_bit_from_wherever_they_are(
    save: Callable[[dict[str, Tensor], Path], Path], tmp_path: Path
) -> None:
    state = weights_of("small-residual")
    assert_same(dict(started(small_recipe(), save(state, tmp_path))), state)


@pytest.mark.parametrize(
    ("name", "head"),
    [(RESNET, "fc."), ("efficientnet_lite0", "classifier."), ("convnext_atto", "head.fc."), ("shvit_s1", "head.")],
)
def test_the_head_of_a_classifier_is_left_out(name: str, head: str, tmp_path: Path) -> None:
    state = weights_of(name)
    assert any(key.startswith(head) for key in state)
    rest = {key: value for key, value in state.items() if not key.startswith(head)}
    assert_same(dict(started(small_recipe(name), save_pickled(state, tmp_path))), rest)


def test_files_older_than_batchnorms_counter_are_taken(tmp_path: Path) -> None:
    state = {key: value for key, value in weights_of(RESNET).items() if not key.endswith("num_batches_tracked")}
    loaded = started(small_recipe(RESNET), save_pickled(state, tmp_path))
    assert_same({key: loaded[key] for key in state if key in loaded}, {k: v for k, v in state.items() if k in loaded})
    assert loaded["bn1.num_batches_tracked"] == 0


def test_the_target_starts_as_the_online_encoder_in_every_tensor() -> None:
    recipe, state = small_recipe(), weights_of("small-residual")
    encoders = encoders_of(recipe, PretrainedWeights("test", state))
    online, target = encoders.online.state_dict(), encoders.target.state_dict()
    assert_same(dict(target), dict(online))
    assert_same({name: target[f"backbone.{name}"] for name in state}, state)


def test_the_heads_are_those_that_the_seed_gives_without_weights() -> None:
    recipe = small_recipe()
    drawn = torch.random.get_rng_state()
    plain, filled = encoders_of(recipe), encoders_of(recipe, PretrainedWeights("test", weights_of("small-residual")))
    assert torch.equal(torch.random.get_rng_state(), drawn)
    own = {name: value for name, value in plain.state_dict().items() if ".backbone." not in name}
    assert_same({name: filled.state_dict()[name] for name in own}, own)
    assert not torch.equal(plain.online.backbone.stem[0].weight, filled.online.backbone.stem[0].weight)


def test_a_mismatch_lists_the_keys_and_stops(tmp_path: Path) -> None:
    state = weights_of("small-residual")
    before = small_recipe()
    network = make_backbone("small-residual")
    kept = {name: value.clone() for name, value in network.state_dict().items()}
    wrong = {f"other.{name}" if "blocks.3" in name else name: value for name, value in state.items()}
    wrong["stem.0.weight"] = torch.zeros(16, 1, 3, 3)
    count = sum("blocks.3" in name for name in state)
    with pytest.raises(BadInput) as refusal:
        load_strict(network, wrong, "here")
    message = str(refusal.value)
    assert f"{count} missing (blocks.3.body.0.weight, blocks.3.body.1.weight and {count - 2} more)" in message
    assert f"{count} too many (other.blocks.3.body.0.weight, " in message
    assert "1 of another shape (stem.0.weight (16, 1, 3, 3) instead of (16, 3, 3, 3))" in message
    assert "\n" not in message
    assert_same(dict(network.state_dict()), kept)
    with pytest.raises(
        BadInput, match=r"is of another architecture than the recipe: .*; give weights of this backbone"
    ):
        started(before, save_safetensors(wrong, tmp_path))


def test_weights_of_another_architecture_and_for_another_stem_are_refused(tmp_path: Path) -> None:
    file = save_safetensors(weights_of(RESNET), tmp_path)
    with pytest.raises(BadInput, match=r"60 missing \(stem\.0\.weight"):
        started(small_recipe(), file)
    file = save_safetensors(weights_of("resnet18"), tmp_path)
    with pytest.raises(
        BadInput, match=r"1 of another shape \(conv1\.weight \(64, 3, 7, 7\) instead of \(64, 3, 3, 3\)\)"
    ):
        started(small_recipe("resnet18", stem="small"), file)


class Harmful:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.victim,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    for state in (Harmful(tmp_path / "harm"), {"stem.0.weight": Harmful(tmp_path / "harm")}):
        file = save_pickled(state, tmp_path)
        plain = tmp_path / "plain.pth"
        plain.write_bytes(pickle.dumps(state))
        for each in (file, plain):
            with pytest.raises(BadInput, match="it is damaged, or holds more than tensors"):
                load_pretrained(str(each), "small-residual", 32)
    assert not (tmp_path / "harm").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists()  # the file would have done it


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_damaged_file_is_refused_wherever_it_ends(suffix: str, tmp_path: Path) -> None:
    save = save_safetensors if suffix == ".safetensors" else save_pickled
    file = save(weights_of("small-residual"), tmp_path)
    whole = file.read_bytes()
    for length in (0, 1, 7, 8, 9, 64, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(BadInput, match="cannot read --init") as refusal:
            load_pretrained(str(file), "small-residual", 32)
        assert len(str(refusal.value).removeprefix(f"cannot read --init {file}")) < 200


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "holds no weights"),
        ([1, 2], "holds no weights"),
        ({"state_dict": {}}, "holds no weights"),
        (torch.zeros(3), "holds no weights"),
        ({"weight": 3}, "'weight' is of type int"),
        ({1: torch.zeros(1)}, "'1' is of type Tensor"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "is not a state dict"),
        ({"weight": torch.zeros(2, device="meta")}, "is not a state dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load_pretrained(str(save_pickled(state, tmp_path)), "small-residual", 32)


def test_what_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "recipe.yaml").touch()
    for init, message in (
        (f"{tmp_path}/gone.pt", "not found; give a file, a run, or"),
        (f"{tmp_path}/resnet8.a1_in1k", "did you mean resnet18.a1_in1k"),
        ("resnet18.a1_in1q", "timm has no weights resnet18.a1_in1q; did you mean resnet18.a1_in1k"),
        (str(tmp_path), "is a folder without weights"),
        (str(stopped), "is not a finished run: it has no backbone.safetensors"),
    ):
        with pytest.raises(BadInput, match=message):
            load_pretrained(init, "resnet18", 32)


def test_a_name_for_another_backbone_is_refused_with_the_flag_to_add() -> None:
    with pytest.raises(BadInput) as refusal:
        load_pretrained("efficientnet_lite0.ra_in1k", "resnet18", 32)
    assert str(refusal.value) == (
        "--init efficientnet_lite0.ra_in1k is for efficientnet_lite0, and the backbone is resnet18; "
        "add --backbone efficientnet_lite0"
    )


def test_a_name_stays_a_name_whatever_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet18").mkdir()
    assert is_timm_name("resnet18")
    assert is_timm_name("resnet18.a1_in1k")
    assert not is_timm_name("./resnet18")
    assert not is_timm_name("resnet18.pth")
    assert not is_timm_name("my-run")


def test_the_hash_goes_by_names_and_values_and_not_by_the_file(tmp_path: Path) -> None:
    state = weights_of("small-residual")
    files = [save_safetensors(state, tmp_path), save_pickled({"model": state}, tmp_path)]
    one, other = (load_pretrained(str(file), "small-residual", 32).sha256 for file in files)
    assert one == other
    changed = state | {"stem.0.weight": -state["stem.0.weight"]}
    renamed = {name.replace("stem.0", "stem.9"): value for name, value in state.items()}
    assert len({PretrainedWeights("", each).sha256 for each in (state, changed, renamed)}) == 3


def test_a_run_starts_from_a_file_and_says_so_wherever_it_is_asked(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights_of("small-residual")
    save_safetensors(state, tmp_path)
    monkeypatch.chdir(tmp_path)
    run = cmsf.train("msf-small", bars, "run", quiet=True, init="weights.safetensors", **(TINY | {"lr": 1e-12}))
    assert run.recipe.init == str(tmp_path / "weights.safetensors")
    assert ResolvedRecipe.from_yaml(run.recipe.to_yaml(), "test") == run.recipe
    environment = json.loads(run.folder.environment_file.read_text())
    assert environment["init_sha256"] == PretrainedWeights("", state).sha256
    trained = safetensors.torch.load_file(run.folder.backbone_file)
    torch.testing.assert_close(trained["stem.0.weight"], state["stem.0.weight"], rtol=1e-4, atol=1e-6)

    references = run.references()
    assert references.keys() == {"raw pixels", "starting weights"}
    assert (run.path / "results" / "knn-starting-weights.json").exists()
    save_safetensors(weights_of("small-residual", seed=8), tmp_path)
    with pytest.raises(BadInput, match="have changed since run began"):
        run.references()


def test_a_run_takes_tensors_in_order_says_what_it_left_out_and_can_be_fine_tuned(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where runs/ is
    state = weights_of("small-residual")
    other = {f"net.{number}": value for number, value in enumerate(state.values())} | {"fc.weight": torch.zeros(3, 128)}
    command = ["train", "msf-small", "--data", str(bars), "--out", str(tmp_path / "run"), "--epochs", "1"]
    command += ["--batch-size", "32", "--init", str(save_pickled(other, tmp_path))]
    assert main(command) == 2
    assert capsys.readouterr().err.endswith("if they are of this backbone, add --init-by-order\n")
    assert main([*command, "--init-by-order"]) == 0
    assert "weights.pt: 1 tensor beside the backbone left out (fc.weight)" in capsys.readouterr().err
    run = cmsf.Run(tmp_path / "run")
    counted = {name: value for name, value in state.items() if value.ndim}
    assert run.folder.environment()["init_sha256"] == PretrainedWeights("", counted).sha256
    assert "starting weights" in run.references()
    weights = [
        "--init",
        str(tmp_path / "weights.pt"),
        "--init-by-order",
        "--backbone",
        "small-residual",
        "--size",
        "16",
    ]
    assert main(["embed", *weights, "--data", str(bars), "--out", str(tmp_path / "features.npz")]) == 0
    assert main(["evaluate", str(run.path), "--init-by-order"]) == 2
    assert "--init-by-order is for weights without a run; add --init" in capsys.readouterr().err
    classifier = cmsf.finetune(run.path, tune="linear", quiet=True)
    assert not classifier.recipe.init_by_order


def test_order_without_weights_is_refused(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--init-by-order is for a file of weights, and --init is none; give a file"):
        cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, init_by_order=True, **TINY)
    assert not (tmp_path / "run").exists()


def test_a_file_given_as_a_run_is_called_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save_safetensors(weights_of("small-residual"), tmp_path)
    assert main(["evaluate", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"cmsf: {file} is a file and not a run; weights without a run are named by --init {file}, with --data SOURCE\n"
    )
    (tmp_path / "notes.txt").touch()
    assert main(["evaluate", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt is a file and not a run; give a folder that cmsf train wrote" in capsys.readouterr().err


def test_a_run_starts_from_another_run_and_without_weights_it_is_as_ever(bars: Path, tmp_path: Path) -> None:
    first = cmsf.train("msf-small", bars, tmp_path / "first", quiet=True, **TINY)
    assert "init_sha256" not in json.loads(first.folder.environment_file.read_text())
    second = cmsf.train("msf-small", bars, tmp_path / "second", quiet=True, init=str(first.path), **TINY)
    before = encoders_of(second.recipe, load_pretrained(second.recipe.init, "small-residual", 16)).online.backbone
    assert_same(dict(before.state_dict()), safetensors.torch.load_file(first.folder.backbone_file))
    assert second.references()["starting weights"] == first.evaluate("knn")


def test_a_resumed_run_needs_its_weights_no_more(bars: Path, tmp_path: Path) -> None:
    file = save_safetensors(weights_of("small-residual"), tmp_path)
    settings = TINY | {"init": str(file)}
    whole = cmsf.train("cmsf-self-small", bars, tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, tmp_path / "parts", screen=StopAt(6, signal.SIGTERM), **settings)
    file.unlink()
    assert_same_run(whole, cmsf.train("cmsf-self-small", bars, tmp_path / "parts", quiet=True, **settings))
    with pytest.raises(BadInput, match="not found"):
        whole.references()


def test_a_run_without_a_checkpoint_begins_again_from_the_same_weights_alone(bars: Path, tmp_path: Path) -> None:
    file = save_safetensors(weights_of("small-residual"), tmp_path)
    settings = TINY | {"init": str(file)}
    with pytest.raises(Stopped):
        cmsf.train("msf-small", bars, tmp_path / "run", screen=StopAt(2, signal.SIGTERM), **settings)
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.unlink()
    save_safetensors(weights_of("small-residual", seed=8), tmp_path)
    with pytest.raises(BadInput, match=r"have changed since .* began \(sha256 "):
        cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **settings)
    save_safetensors(weights_of("small-residual"), tmp_path)
    cmsf.train("msf-small", bars, tmp_path / "run", quiet=True, **settings)


def test_what_cannot_be_loaded_leaves_no_folder_behind(
    bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save_safetensors(weights_of(RESNET), tmp_path)
    out = tmp_path / "runs" / "run"
    for init in (str(file), str(tmp_path / "gone.pt"), "no-such-weights", "resnet18"):
        assert main(["train", "msf-small", "--data", str(bars), "--out", str(out), "--quiet", "--init", init]) == 2
        said = capsys.readouterr().err
        assert said.startswith("cmsf: ")
        assert said.count("\n") == 1
        assert not out.parent.exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only cache there is, on a machine without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("init", [PRETRAINED, RESNET])  # the bare name: timm's default weights of it
def test_timms_weights_come_from_the_hubs_cache(init: str, hub: Path) -> None:
    state = weights_of(RESNET)
    put_into_hub_cache(state, PRETRAINED, hub)
    drawn = torch.random.get_rng_state()
    start = load_pretrained(init, RESNET, 32)
    assert_same(start.tensors, {name: value for name, value in state.items() if not name.startswith("fc.")})
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert start.notes == ()


def test_a_run_starts_from_timms_weights_and_says_what_images_they_expect(
    hub: Path, bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_hub_cache(weights_of(RESNET), PRETRAINED, hub)
    run = cmsf.train("msf-small", bars, tmp_path / "run", backbone=RESNET, init=RESNET, **(TINY | {"epochs": 1}))
    assert capsys.readouterr().err.count(f"bicubic, crop 0.875, by timm's configuration of {RESNET}; ") == 1
    assert run.recipe.init == RESNET
    assert run.folder.environment()["init_sha256"] == load_pretrained(PRETRAINED, RESNET, 16).sha256


def test_without_a_network_or_a_cache_one_message_says_what_to_do(
    hub: Path, bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", "msf-small", "--data", str(bars), "--out", str(out), "--quiet"]
    assert main([*command, "--backbone", RESNET, "--init", PRETRAINED]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"cmsf: cannot get {PRETRAINED} from the Hugging Face Hub or its cache (")
    assert said.endswith("); give a file\n")
    assert said.count("\n") == 1
    assert not out.exists()


@pytest.fixture
def from_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Tensor]], None]:
    """What a download would give."""

    def given(state: dict[str, Tensor]) -> None:
        monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(state))

    return given


def test_timm_resizes_position_embeddings(from_hub: Callable[[dict[str, Tensor]], None]) -> None:
    state = weights_of(VIT, num_classes=1000)
    from_hub(state)
    start = load_pretrained(VIT, VIT, 64)
    assert f"{VIT} was trained at 224 px; its position embeddings are resampled for 64 px" in start.notes
    tensors = start.tensors
    assert tensors["pos_embed"].shape == (1, 1 + 16, 192)
    assert torch.equal(tensors["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    assert "head.weight" not in tensors


def test_what_is_missing_in_timms_file_is_not_left_random(from_hub: Callable[[dict[str, Tensor]], None]) -> None:
    state = weights_of(RESNET)
    del state["layer1.0.conv1.weight"]
    from_hub(state)
    with pytest.raises(BadInput, match=r"layer1\.0\.conv1\.weight"):
        load_pretrained(PRETRAINED, RESNET, 32)


def test_timms_weights_do_not_fit_a_small_stem(from_hub: Callable[[dict[str, Tensor]], None]) -> None:
    from_hub(weights_of("resnet18"))
    with pytest.raises(BadInput, match=r"1 of another shape \(conv1\.weight \(64, 3, 7, 7\) instead of"):
        started(small_recipe("resnet18", stem="small"), "resnet18.a1_in1k")
