"""What is done to images before a network sees them: torchvision's operations, as weights expect them, as recorded."""

import ast
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from helpers import noise, write_npz, write_photos
from PIL import Image
from runs import TINY
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as reference
from torchvision.transforms.v2.functional import pil_to_tensor

import cmsf
from cmsf.data import Dataset, Split, load_dataset, open_source
from cmsf.data.prepare import inference_split
from cmsf.data.transforms import (
    Augmentation,
    Preprocessing,
    RandomCrop,
    ResizedCenterCrop,
    WholeBatch,
    crop_and_resize,
    resized_crop,
)
from cmsf.evaluation import FeatureExtractor, evaluate_knn, evaluate_linear
from cmsf.evaluation.finetune import FineTuneSettings, train_classifier
from cmsf.evaluation.knn import evaluate_retrieval
from cmsf.method.build import make_learner
from cmsf.models.backbones import patch_size
from cmsf.models.expected_input import METADATA, expected_input
from cmsf.recipes.recipe import Recipe, ResolvedRecipe, metavar
from cmsf.training.resolve import resolve
from cmsf.utils.errors import BadInput

DOCS = Path(__file__).parents[1] / "docs" / "evaluation.md"
SIZE = 16
SHAPES = [(10, 12), (16, 16), (16, 21), (21, 16), (20, 14), (14, 20), (20, 30), (31, 23), (32, 32), (25, 24), (27, 90)]
"""Smaller than the view, equal, larger; portrait, landscape, square; with halves to round. None is shrunk."""
OTHER = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2), "interpolation": "bicubic"}
PREPROCESSINGS = [
    Preprocessing(SIZE),
    Preprocessing(SIZE, crop_pct=0.8, **OTHER),
    Preprocessing(SIZE, clean_crop="standard"),
    Preprocessing(SIZE, clean_crop="standard", crop_pct=0.95, **OTHER),
    Preprocessing(SIZE, clean_crop="standard", crop_pct=1.0),
]
NAMES = ["small-whole", "small-whole bicubic", "standard", "standard bicubic", "standard uncropped"]


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (3, height, width), generator=generator, dtype=torch.uint8)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()


def of_the_docs() -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """The function of the page on evaluation that repeats a clean view with plain torchvision."""
    text = DOCS.read_text(encoding="utf-8")
    block = next(part for part in text.split("```") if part.startswith("python") and "def clean_view" in part)
    body = ast.parse(block.removeprefix("python")).body
    kept = [part for part in body if isinstance(part, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), "docs/evaluation.md", "exec"), names)
    assert "cmsf" not in ast.unparse(kept[-1])
    return names["clean_view"]


def replay(images: Sequence[Tensor], about: dict[str, Any], backbone: nn.Module) -> Tensor:
    """Features by the docs' function and what was recorded alone."""
    clean_view = of_the_docs()
    with torch.no_grad():
        return normalize(backbone(torch.stack([clean_view(image, about) for image in images])), dim=1)


def recorded(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(record))["protocol"]["preprocessing"]


@pytest.mark.parametrize("size", [7, 16, 33, 64])
def test_bicubic_crops_are_torchvisions_whether_they_shrink_or_grow(size: int) -> None:
    images = torch.stack([picture(40, 52, seed) for seed in range(4)])
    boxes = torch.tensor([[0, 0, 40, 52], [3, 10, 9, 30], [20, 1, 20, 5], [39, 51, 1, 1]])
    flipped = torch.tensor([False, True, False, True])
    result = crop_and_resize(images, boxes, size, flipped, "bicubic")
    how = {"interpolation": InterpolationMode.BICUBIC, "antialias": True}
    overshoots = False
    for i, box in enumerate(boxes):
        exact, rounded = (
            reference.resized_crop(image, *box.tolist(), [size, size], **how)
            for image in (images[i].float() / 255, images[i])
        )
        expected = exact.clamp(0, 1)
        overshoots |= not torch.equal(exact, expected)
        expected = reference.horizontal_flip(expected) if flipped[i] else expected
        torch.testing.assert_close(result[i], expected, rtol=0, atol=5e-6)
        assert torch.equal(resized_crop(images[i], boxes[i], size, flipped=False, interpolation="bicubic"), rounded)
    assert overshoots or size == 7


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_standard_crop_is_timms(shape: tuple[int, int], interpolation: str) -> None:
    from timm.data import create_transform

    image = picture(*shape)
    for share in (0.875, 0.95, 1.0):
        crop = ResizedCenterCrop(SIZE, share, interpolation)
        whole = torch.tensor([0, 0, *shape])
        found = resized_crop(image, whole, SIZE, False, interpolation, crop.resized(*shape))
        transform = create_transform(SIZE, crop_pct=share, interpolation=interpolation, mean=(0, 0, 0), std=(1, 1, 1))
        expected = transform(reference.to_pil_image(image)) * 255
        assert (found - expected).abs().max() <= 1.01  # Pillow rounds after each direction


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [(4, 1200), (1200, 4)])
def test_a_strip_is_cut_as_if_it_had_been_resized_whole(shape: tuple[int, int], interpolation: Any) -> None:
    crop = ResizedCenterCrop(SIZE, 0.875, interpolation)
    image = torch.randint(256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tall, wide = crop.resized(*shape)
    assert max(tall, wide) > 32 * SIZE  # a strip
    whole = torch.nn.functional.interpolate(image[None].float(), (tall, wide), mode=interpolation, antialias=True)[0]
    top, left = round((tall - SIZE) / 2), round((wide - SIZE) / 2)
    expected = whole[:, top : top + SIZE, left : left + SIZE].round().clamp(0, 255)
    box = torch.tensor([0, 0, *shape])
    found = resized_crop(image, box, SIZE, False, interpolation, (tall, wide))
    assert (found.int() - expected.int()).abs().max() <= 1
    assert torch.equal(resized_crop(image, box, SIZE, True, interpolation, (tall, wide)), found.flip(-1))


@pytest.mark.parametrize("preprocessing", PREPROCESSINGS, ids=NAMES)
def test_features_are_repeated_by_plain_torchvision_from_the_record_alone(preprocessing: Preprocessing) -> None:
    images = [picture(*shape, seed) for seed, shape in enumerate(SHAPES * 2)]
    truth = torch.arange(len(images)) % 2
    split = Split(images, [str(i) for i in range(len(images))], truth, truth)
    extractor = FeatureExtractor(network(), preprocessing)
    data = Dataset("pictures", ("a", "b"), ("a", "b"), split, split, "the same")
    for evaluate in (evaluate_knn, evaluate_retrieval, evaluate_linear):
        about = recorded(evaluate(extractor, data).report())
        assert about["rounded"] is True
        torch.testing.assert_close(replay(images, about, network()), extractor(split), rtol=0, atol=1e-5)
    other = about | {"crop_pct": 0.7, "clean_crop": "standard"}
    assert (replay(images, other, network()) - extractor(split)).abs().max() > 1e-3


@pytest.mark.parametrize("preprocessing", PREPROCESSINGS, ids=NAMES)
@pytest.mark.parametrize("shape", [(12, 12), (16, 16), (24, 30), (30, 24)], ids=str)
def test_features_of_images_in_one_array_are_repeated_too(preprocessing: Preprocessing, shape: tuple[int, int]) -> None:
    images = torch.stack([picture(*shape, seed) for seed in range(6)])
    truth = torch.arange(6) % 2
    split = Split(images, [str(i) for i in range(6)], truth, truth)
    extractor = FeatureExtractor(network(), preprocessing)
    data = Dataset("pictures", ("a", "b"), ("a", "b"), split, split, "the same")
    about = recorded(evaluate_knn(extractor, data).report())
    assert about["rounded"] is False
    torch.testing.assert_close(replay([*images], about, network()), extractor(split), rtol=0, atol=1e-5)
    views = cmsf.clean_view(images, preprocessing)
    torch.testing.assert_close(views, torch.stack([of_the_docs()(i, about) for i in images]), rtol=0, atol=1e-4)


def test_a_classifier_says_how_its_predictions_are_repeated(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 12, 2, side=10)  # none is shrunk
    settings = TINY | {"epochs": 1, "batch_size": 16, "mean": "0.5,0.4,0.3", "clean_crop": "standard", "size": 16}
    run = cmsf.train("msf-small", photos, tmp_path / "run", quiet=True, **settings)
    classifier = cmsf.finetune(run.path, tune="linear", quiet=True)
    about = json.loads(classifier.folder.classifier_file.read_text())["preprocessing"]
    assert about["mean"] == [0.5, 0.4, 0.3]
    assert about == classifier.result("classifier")["protocol"]["preprocessing"]
    rows = classifier.predict(photos)
    views = torch.stack([of_the_docs()(pil_to_tensor(Image.open(photos / row.path)), about) for row in rows])
    with torch.no_grad():
        scores = classifier.network()(views.contiguous(memory_format=torch.channels_last)).softmax(1)
    found = torch.tensor([dict(zip(row.labels, row.confidences, strict=True))[classifier.classes[0]] for row in rows])
    torch.testing.assert_close(scores[:, 0], found, rtol=0, atol=1e-4)


def test_photos_larger_than_twice_the_view_are_shrunk_first_as_the_record_says(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 3, 1, side=80)
    split = load_dataset(open_source(photos), Recipe(cache="ram"), SIZE).train
    about = Preprocessing(SIZE).report()
    assert "above 32 px is kept in memory shrunk to it" in about["stored"]
    assert {min(image.shape[1:]) for image in split.images} == {32}
    again = inference_split(open_source(photos).splits["train"], SIZE).images
    assert {min(again.decode(i, 0).shape[1:]) for i in range(3)} == {32}


def test_runs_from_random_weights_see_what_they_always_saw(tmp_path: Path) -> None:
    """Also those that are older than these settings; their caches know a view by the words of that time."""
    old = Path(__file__).parent / "fixtures" / "run-0.1" / "stopped" / "recipe.yaml"
    assert "\nmean:" not in old.read_text()
    assert Preprocessing.from_recipe(ResolvedRecipe.read(old)) == Preprocessing(ResolvedRecipe.read(old).size)
    new = resolve(Recipe(backbone="small-residual"), noise(30, 6), 28)
    assert Preprocessing.from_recipe(new) == Preprocessing(28)
    assert Preprocessing(28).key == "resize 32, centre crop 28; images with no side above 28 px whole"
    assert len({replace(each, size=28).key for each in PREPROCESSINGS}) == len(PREPROCESSINGS)


def test_training_views_have_the_recipes_colours_and_interpolation() -> None:
    recipe = Recipe(backbone="small-residual", objective="paws", extra_crops=1, support_classes=2, support_images=2)
    recipe = recipe.changed({"mean": "0.5,0.4,0.3", "std": "0.5,0.25,0.2", "interpolation": "bicubic", "size": 16})
    data = noise(30, 6)
    data = replace(data, train=replace(data.train, label=torch.where(torch.arange(30) < 15, data.train.label, -1)))
    views = make_learner(resolve(recipe.changed({"epochs": 1}), data, 16), data.train.label, "cpu").views
    assert len(views) == 5
    for view in views.values():
        assert (view.mean, view.std, view.crop.interpolation) == tuple(OTHER.values())

    batch = WholeBatch(torch.arange(4), 0, 0, torch.stack([picture(24, 24, seed) for seed in range(4)]))
    plain, other = RandomCrop(16), RandomCrop(16, interpolation="bicubic")
    pixels = Augmentation(plain, mean=(0, 0, 0), std=(1, 1, 1))(batch, 0)
    shifted = Augmentation(plain, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))(batch, 0)
    torch.testing.assert_close(shifted, 2 * pixels - 1)
    assert (Augmentation(other, mean=(0, 0, 0), std=(1, 1, 1))(batch, 0) - pixels).abs().max() > 0.01


def test_fine_tuning_sees_the_same_colours() -> None:
    seen: list[Tensor] = []

    class Recorder(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images.detach())
            return images.mean((2, 3))

    white = Split(torch.full((16, 3, 12, 12), 255, dtype=torch.uint8), [""] * 16, *[torch.arange(16) % 2] * 2)
    extractor = FeatureExtractor(Recorder(), Preprocessing(12, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)))
    classifier = nn.Sequential(extractor.backbone, nn.Linear(3, 2))
    train_classifier(classifier, white, white.label, extractor, 0, FineTuneSettings(epochs=1, min_steps=0))
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 2.0))


def test_timms_configuration_says_what_its_weights_expect() -> None:
    lite = {
        "size": 224,
        "mean": "0.5,0.5,0.5",
        "std": "0.5,0.5,0.5",
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "clean_crop": "standard",
    }
    found = expected_input("tf_efficientnet_lite0.in1k", "tf_efficientnet_lite0")
    assert found is not None
    assert found.settings == lite
    of_a_file = expected_input("weights.pth", "tf_efficientnet_lite0")
    assert of_a_file is not None
    assert of_a_file.settings == lite
    assert of_a_file.origin == "timm's configuration of tf_efficientnet_lite0"
    assert expected_input("weights.pth", "small-residual") is None
    for name in timm.list_pretrained("*tiny*"):  # values of all of them pass the recipe's checks
        expected = expected_input(name, name.split(".")[0])
        assert expected is None or Recipe().changed(expected.settings)


def test_views_are_no_larger_than_images_and_a_multiple_of_the_patches() -> None:
    for backbone, median, size in [
        ("resnet18", 1000, 224),
        ("resnet18", 100, 100),
        ("resnet18", 5, 8),
        ("vit_tiny_patch16_224", 100, 96),
        ("vit_tiny_patch16_224", 10, 16),
        ("vit_tiny_patch16_224", 1000, 224),
    ]:
        expected = expected_input(backbone, backbone)
        assert expected is not None
        assert expected.fit(Recipe(backbone=backbone), median).size == size
        assert expected.fit(Recipe(backbone=backbone, size=60), median).size == 60
    assert patch_size("small-residual") == 1


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz", per_class=20, side=20)


@pytest.fixture(scope="module")
def run(bars: Path) -> cmsf.Run:
    settings = TINY | {"epochs": 1, "mean": "0.5,0.4,0.3", "interpolation": "bicubic", "size": 16}
    return cmsf.train("msf-small", bars, bars.parent / "run", quiet=True, **settings)


@pytest.mark.parametrize("kind", ["run", "file"])
def test_a_run_sees_images_as_the_run_or_the_file_it_starts_from(
    kind: str, run: cmsf.Run, bars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init = run.path if kind == "run" else Path(shutil.copy(run.folder.backbone_file, tmp_path / "weights.safetensors"))
    settings = TINY | {"epochs": 1, "std": "0.3,0.3,0.3"}
    second = cmsf.train("msf-small", bars, tmp_path / "second", init=str(init), **settings)
    origin = "the recipe of" if kind == "run" else "the metadata of"
    line = f"images of 16 px, mean 0.5,0.4,0.3, std 0.3,0.3,0.3, bicubic, crop 0.875, by {origin} {init}; "
    assert capsys.readouterr().err.replace("\n", "").count(line.replace("\n", "")) == 1
    assert second.preprocessing == replace(run.preprocessing, std=(0.3, 0.3, 0.3))
    assert "mean: 0.5,0.4,0.3\n" in second.folder.recipe_file.read_text()
    shutil.rmtree(tmp_path / "weights", ignore_errors=True)
    again = cmsf.train("msf-small", bars, tmp_path / "second", quiet=True, init=str(init), **settings)
    assert again.recipe == second.recipe


def test_a_run_that_began_before_these_settings_goes_on_as_it_was(bars: Path, run: cmsf.Run, tmp_path: Path) -> None:
    second = cmsf.train("msf-small", bars, tmp_path / "old", quiet=True, init=str(run.path), **TINY)
    file = second.folder.recipe_file
    settings = ("mean:", "std:", "interpolation:", "crop_pct:", "clean_crop:")
    lines = [line for line in file.read_text().splitlines() if not line.startswith(settings)]
    file.write_text("\n".join(lines))
    again = cmsf.train("msf-small", bars, tmp_path / "old", quiet=True, init=str(run.path), **TINY)
    assert again.preprocessing == Preprocessing(16)


@pytest.mark.parametrize(
    "content",
    [
        "not JSON",
        "[" * 100_000,
        "{}",
        json.dumps({"size": 224}),
        json.dumps({"size": "auto", "mean": "auto", "std": "auto"} | dict.fromkeys(("interpolation",), "auto")),
    ],
    ids=["text", "deep", "empty", "other", "open"],
)
def test_metadata_that_say_something_else_are_passed_over(content: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(1)}, file, metadata={METADATA: content})
    assert expected_input(str(file), "small-residual") is None
    found = expected_input(str(file), "resnet18")
    assert found is not None
    assert found.origin == "timm's configuration of resnet18"


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("mean", "0.5", "invalid value --mean 0.5; expected red, green and blue, as 0.485,0.456,0.406"),
        ("mean", "0.5,0.5,x", "invalid value --mean 0.5,0.5,x; expected red, green and blue"),
        ("mean", 0.5, "invalid value --mean 0.5; expected R,G,B"),
        ("mean", "123.675,116.28,103.53", "is out of range; use numbers from 0 to 1"),
        ("std", "0.2,0,0.2", "--std 0.2,0,0.2 is out of range; use numbers from 0.001 to 1"),
        ("std", "nan,nan,nan", "invalid value --std nan,nan,nan"),
        ("crop_pct", 1.5, "--crop-pct 1.5 is out of range"),
        ("interpolation", "cubic", "expected bilinear or bicubic or auto"),
    ],
)
def test_settings_that_are_none_are_refused_in_a_line(setting: str, value: object, message: str) -> None:
    with pytest.raises(BadInput) as refusal:
        Recipe().changed({setting: value})
    assert message in str(refusal.value)
    assert metavar("mean") == "R,G,B"
