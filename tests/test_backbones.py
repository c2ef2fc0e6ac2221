import pytest
import torch
from helpers import noise
from torch import nn

from cmsf.models.backbones import feature_width, make_backbone
from cmsf.models.encoders import Encoders
from cmsf.models.heads import mlp
from cmsf.recipes import get_recipe
from cmsf.training.resolve import resolve
from cmsf.utils.errors import BadInput


@pytest.mark.parametrize(
    ("name", "stem", "side"),
    [
        ("small-residual", "standard", 28),
        ("resnet18", "standard", 64),
        ("resnet18", "small", 32),
        ("mobilenetv3_small_050", "standard", 64),
        ("vit_tiny_patch16_224", "standard", 64),
    ],
)
def test_a_backbone_turns_images_into_features_of_its_width(name: str, stem, side: int) -> None:
    backbone = make_backbone(name, stem, side).eval()
    assert backbone(torch.zeros(2, 3, side, side)).shape == (2, feature_width(backbone, name, side))


def test_the_small_stem_keeps_the_resolution() -> None:
    backbone = make_backbone("resnet18", "small")
    assert backbone.forward_features(torch.zeros(1, 3, 32, 32)).shape[-2:] == (4, 4)


def test_an_unknown_backbone_is_named_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean resnet18"):
        make_backbone("resnet81")
    with pytest.raises(BadInput, match="--stem small"):
        make_backbone("vit_tiny_patch16_224", "small")


def test_a_size_that_a_backbone_cannot_take_is_refused() -> None:
    with pytest.raises(BadInput, match="does not work with images of 30 px"):
        feature_width(make_backbone("vit_tiny_patch16_224", size=32), "vit_tiny_patch16_224", 30)


def test_the_target_starts_as_the_online_encoder_and_follows_it() -> None:
    torch.manual_seed(0)
    encoders = Encoders(make_backbone("small-residual"), 8, mlp(128, 16, 8))
    for name, value in encoders.target.state_dict().items():
        assert torch.equal(value, encoders.online.state_dict()[name])
    before = [p.clone() for p in encoders.target.parameters()]
    with torch.no_grad():
        for p in encoders.online.parameters():
            p.add_(torch.randn_like(p))
    encoders.update_ema(0.9)
    for old, target, online in zip(before, encoders.target.parameters(), encoders.online.parameters(), strict=True):
        torch.testing.assert_close(target, 0.9 * old + 0.1 * online)
    assert not any(p.requires_grad for p in encoders.target.parameters())


def test_a_network_that_computes_while_it_is_built_is_resolved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def make(name: str, stem: str, size: int) -> nn.Module:
        built.append(str(torch.zeros(1).device))
        torch.linspace(0, 1, 3)[1].item()  # as for stochastic depth; a meta tensor has no numbers
        return make_backbone(name, "standard", size)

    def refused(name: str, stem: str, size: int) -> nn.Module:
        try:
            return make(name, stem, size)
        except RuntimeError as error:
            raise BadInput(str(error)) from None

    monkeypatch.setattr("cmsf.training.resolve.make_backbone", refused)
    before = torch.random.get_rng_state()
    assert resolve(get_recipe("msf-small"), noise(12, 3), 12).projection_hidden == 512
    assert built == ["meta", "cpu"]
    assert torch.equal(torch.random.get_rng_state(), before)
