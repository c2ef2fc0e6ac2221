"""Fewer bits, and more: what is computed in them, and what never is."""

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import write_npz
from runs import TINY, StopAt, assert_same, assert_same_run, metrics, state
from torch.amp import GradScaler

import cmsf
from cmsf.data.transforms import Preprocessing, WholeBatch
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.finetune import make_classifier
from cmsf.evaluation.linear_sgd import _random_views
from cmsf.evaluation.predict import predict_scores
from cmsf.method.build import make_learner
from cmsf.method.learner import Diverged, Learner
from cmsf.recipes.recipe import ResolvedRecipe
from cmsf.training.signals import Stopped


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


SMALL = TINY | {"size": 8, "log_every": 1}
"""Of small views, for a CPU takes its time in half the bits."""


def train(bars: Path, out: Path, **changes: object) -> cmsf.Run:
    return cmsf.train("cmsf-self-small", bars, out, quiet=True, **(SMALL | changes))


@pytest.fixture(scope="module")
def trained(bars: Path) -> Callable[[str], cmsf.Run]:
    """A run in some precision."""
    return cache(lambda precision: train(bars, bars.parent / precision, precision=precision))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mixed_run_keeps_weights_bank_and_losses_in_fp32_and_rests_its_cache_in_half(
    precision: str, trained: Callable[[str], cmsf.Run]
) -> None:
    run = trained(precision)
    kept = state(run)
    assert {
        value.dtype for value in kept["bank"].values() if isinstance(value, torch.Tensor) and value.is_floating_point()
    } == {torch.float32}
    assert kept["cache"].dtype == torch.float16
    weights = {value.dtype for name, value in kept["encoders"].items() if name.endswith("weight")}
    assert weights == {torch.float32}
    assert cmsf.load(run.path)(torch.zeros(2, 3, 16, 16)).dtype == torch.float32


def first_losses(run: cmsf.Run) -> list[float]:
    return [line["loss"] for line in metrics(run, "step")]


def test_bf16_computes_nearly_what_fp32_does_and_really_less_exactly(trained: Callable[[str], cmsf.Run]) -> None:
    exact, mixed = map(trained, ("fp32", "bf16"))
    first, second = first_losses(exact)[0], first_losses(mixed)[0]
    assert first != second
    assert first == pytest.approx(second, rel=0.03)


def test_fp64_computes_what_fp32_does_to_more_places(trained: Callable[[str], cmsf.Run]) -> None:
    single, double = map(trained, ("fp32", "fp64"))
    assert first_losses(single)[0] == pytest.approx(first_losses(double)[0], rel=1e-5)
    assert first_losses(single)[0] != first_losses(double)[0]
    assert state(double)["bank"]["embedding"].dtype == torch.float64
    assert state(double)["encoders"]["online.backbone.stem.0.weight"].dtype == torch.float64


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_the_number_in_training_is_the_number_afterwards_in_any_precision(
    precision: str, trained: Callable[[str], cmsf.Run]
) -> None:
    run = trained(precision)
    shown = metrics(run, "epoch")[-1]
    accuracy = cmsf.Run(run.path).evaluate("knn")
    assert accuracy == {name: shown[name] for name in accuracy}


@pytest.mark.parametrize(("precision", "method"), [("bf16", "cmsf-self"), ("fp16", "cmsf-semi"), ("fp64", "cmsf-semi")])
def test_a_stopped_run_resumes_bit_for_bit_in_any_precision(
    precision: str, method: str, bars: Path, tmp_path: Path
) -> None:
    settings = SMALL | {"precision": precision, "labels_per_class": 8}
    whole = cmsf.train(f"{method}-small", bars, tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(Stopped):
        cmsf.train(f"{method}-small", bars, tmp_path / "parts", screen=StopAt(6, signal.SIGTERM), **settings)
    assert_same_run(whole, cmsf.train(f"{method}-small", bars, tmp_path / "parts", quiet=True, **settings))


def learner(precision: str) -> tuple[Learner, WholeBatch]:
    numbers = {"bank_size": 16, "projection_hidden": 8, "projection_dim": 4, "size": 12, "batch_size": 8}
    numbers |= {"prediction_hidden": 8, "support_classes": 0, "support_images": 0}
    numbers |= {"weak_crop": 0.5, "strong_crop": 0.5, "extra_size": 8, "cache": "ram"}
    made = make_learner(
        ResolvedRecipe(backbone="small-residual", precision=precision, **numbers), torch.full((16,), -1), "cpu"
    )
    pictures = torch.randint(256, (8, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return made, WholeBatch(torch.arange(8), 0, 0, pictures)


def test_gradients_of_fp16_are_scaled_while_they_are_computed_and_not_when_they_are_applied() -> None:
    scaled, batch = learner("fp16")
    assert scaled.scaler.is_enabled()
    assert not learner("bf16")[0].scaler.is_enabled()
    scaled.scaler = GradScaler("cpu", init_scale=256.0)
    scaled.step(batch, 0.9)
    applied = [weight.grad.clone() for weight in scaled.encoders.trainable_parameters()]
    plain, batch = learner("fp32")
    plain.step(batch, 0.9)
    for one, other in zip(applied, plain.encoders.trainable_parameters(), strict=True):
        assert one.norm() == pytest.approx(float(other.grad.norm()), rel=0.3, abs=1e-3)


def test_a_loss_that_is_no_number_stops_the_step_before_the_weights_are_touched() -> None:
    made, batch = learner("fp32")
    with torch.no_grad():
        made.encoders.predictor[-1].bias.fill_(torch.nan)
    before = {name: weight.clone() for name, weight in made.encoders.named_parameters()}
    with pytest.raises(Diverged, match="the loss is nan"):
        made.step(batch, 0.9)
    assert_same({name: weight.detach() for name, weight in made.encoders.named_parameters()}, before)


def test_a_run_that_diverges_says_so_in_one_line_and_keeps_its_last_good_checkpoint(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = Learner.step, [0]

    def poisoned(self: Learner, *given: Any) -> object:
        count[0] += 1
        if count[0] == 7:
            with torch.no_grad():
                self.encoders.predictor[-1].bias.fill_(torch.inf)
        return step(self, *given)

    monkeypatch.setattr(Learner, "step", poisoned)
    with pytest.raises(
        cmsf.BadInput,
        match=r"the loss is nan after step 6 of 12; the last checkpoint, step-00000004.json, is kept; "
        r"train with a lower --lr than 0.2, in another --out",
    ):
        train(bars, tmp_path / "run")
    run = cmsf.Run(tmp_path / "run")
    assert state(run)["progress"]["step"] == 4
    assert all(value.isfinite().all() for value in state(run)["encoders"].values())


@pytest.mark.parametrize("spoil", [lambda stem: stem[0].weight, lambda stem: stem[1].running_mean])
def test_weights_and_statistics_that_are_no_numbers_are_never_saved(
    spoil: Any, bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = Learner.step, [0]

    def spoiled(self: Learner, *given: Any) -> object:
        found = step(self, *given)
        count[0] += 1
        if count[0] == 8:  # the last of the second epoch, whose loss was fine
            with torch.no_grad():
                spoil(self.encoders.online.backbone.stem).fill_(torch.nan)
        return found

    monkeypatch.setattr(Learner, "step", spoiled)
    with pytest.raises(cmsf.BadInput, match=r"NaN or inf.* after step 8 of 12; the last checkpoint, step-00000004"):
        train(bars, tmp_path / "run", evaluate_every=1)
    assert state(cmsf.Run(tmp_path / "run"))["progress"]["step"] == 4


def test_a_step_whose_scaled_gradients_overflow_is_left_out_and_the_next_ones_fit() -> None:
    made, batch = learner("fp16")
    made.scaler = GradScaler("cpu", init_scale=2.0**40)
    before = [weight.clone() for weight in made.encoders.trainable_parameters()]
    made.step(batch, 0.9)
    assert all(torch.equal(now, then) for now, then in zip(made.encoders.trainable_parameters(), before, strict=True))
    for _ in range(40):
        made.step(batch, 0.9)
    assert made.encoders.is_finite()
    assert not torch.equal(made.encoders.trainable_parameters()[0], before[0])


def test_gradients_that_no_scale_can_save_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = learner("fp16")
    made.scaler = GradScaler("cpu", init_scale=2.0)
    made.encoders.online.projector[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    made.step(batch, 0.9)
    with pytest.raises(Diverged, match="at any scale"):
        made.step(batch, 0.9)


def test_evaluations_take_a_network_in_double_precision(trained: Callable[[str], cmsf.Run]) -> None:
    run = trained("fp64")
    like, images = FeatureExtractor(run.backbone(), Preprocessing(16)), run.data().train
    ((_, _, views),) = _random_views(like, images, [(0, torch.arange(4))])
    assert like(images).dtype == views.dtype == torch.float32
    classifier = make_classifier(like, 128, 4, seed=0)
    assert {weight.dtype for weight in classifier.parameters()} == {torch.float32}
    assert predict_scores(classifier, images, like).shape == (144, 4)


@pytest.mark.parametrize(
    ("capabilities", "picked"),
    [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx512_bf16": False, "avx2": True}, "fp32")],
)
def test_precision_auto_is_bf16_where_the_processor_has_instructions_for_it_and_is_said(
    capabilities: dict[str, bool],
    picked: str,
    bars: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    run = cmsf.train("msf-small", bars, tmp_path / "run", device="cpu", **(SMALL | {"epochs": 1, "precision": "auto"}))
    assert run.recipe.precision == picked
    assert f"--precision auto is {picked} here: this " in capsys.readouterr().err
    # The run that is there decides, on whatever processor it goes on; and auto is not the default.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": picked == "fp32"})
    cmsf.train("msf-small", bars, tmp_path / "run", device="cpu", **(SMALL | {"epochs": 1, "precision": "auto"}))
    assert f"--precision auto is {picked} here: as the run began" in capsys.readouterr().err
    assert cmsf.Recipe().precision == "fp32"


def test_a_stopped_run_may_be_resumed_with_precision_auto(bars: Path, tmp_path: Path) -> None:
    settings = SMALL | {"precision": "auto"}
    with pytest.raises(Stopped):
        cmsf.train("msf-small", bars, tmp_path / "run", screen=StopAt(6, signal.SIGTERM), **settings)
    with pytest.raises(cmsf.BadInput, match="precision: fp64 against"):
        cmsf.resume(tmp_path / "run", precision="fp64", quiet=True)
    assert cmsf.resume(tmp_path / "run", precision="auto", quiet=True).folder.is_complete()
