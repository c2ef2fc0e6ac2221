"""RandAugment against torchvision's operations, with the same parameters, image by image."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from cmsf.data.transforms import Augmentation, RandAugment, RandomCrop, WholeBatch, color
from cmsf.data.transforms.crops import RandomStream
from cmsf.data.transforms.rand_augment import OPERATIONS, cutout

SIDE = 32
WHOLE = RandAugment(RandomCrop(SIDE, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0))
"""Shows images of this side as they are, so that what it does to them is RandAugment alone."""


def pictures(count: int, channels: int = 3) -> Tensor:
    """More dark pixels than bright ones, none of them black or white, and every channel with a range of its own."""
    noise = torch.rand(count, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    brightest = torch.tensor([200, 150, 250])[:channels, None, None]
    return (brightest * (0.2 + 0.8 * noise**2)).to(torch.uint8)


def affine(image: Tensor, x: float = 0.0, y: float = 0.0, shear_x: float = 0.0, shear_y: float = 0.0) -> Tensor:
    shear = [math.degrees(math.atan(slope)) for slope in (shear_x, shear_y)]
    return reference.affine(image, 0.0, [x, y], 1.0, shear, InterpolationMode.BILINEAR, center=[0, 0])


# FixMatch's table: the range of the magnitude, and torchvision's operation.
TABLE = {
    "autocontrast": (0, 0, lambda image, _: reference.autocontrast(image)),
    "brightness": (0.05, 0.95, reference.adjust_brightness),
    "colour": (0.05, 0.95, reference.adjust_saturation),
    "contrast": (0.05, 0.95, reference.adjust_contrast),
    "equalise": (0, 0, lambda image, _: reference.equalize((255 * image).round().to(torch.uint8)).float() / 255),
    "identity": (0, 0, lambda image, _: image),
    "posterise": (3.5, 8.5, lambda image, bits: reference.posterize(image, round(bits))),
    "rotate": (-30, 30, lambda image, angle: reference.rotate(image, angle, InterpolationMode.BILINEAR)),
    "sharpness": (0.05, 0.95, reference.adjust_sharpness),
    "shear x": (-0.3, 0.3, lambda image, slope: affine(image, shear_x=slope)),
    "shear y": (-0.3, 0.3, lambda image, slope: affine(image, shear_y=slope)),
    "solarise": (0, 1, reference.solarize),
    # torchvision's own affine moves by any number of pixels, its RandAugment by whole ones.
    "translate x": (-0.3, 0.3, lambda image, share: affine(image, x=share * SIDE)),
    "translate y": (-0.3, 0.3, lambda image, share: affine(image, y=share * SIDE)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TABLE)
def test_every_operation_is_torchvisions(name: str, channels: int) -> None:
    low, high, theirs = TABLE[name]
    images, magnitude = pictures(9, channels).float() / 255, torch.linspace(low, high, 9)
    result = OPERATIONS[name].apply(images, magnitude)
    for i in range(9):
        torch.testing.assert_close(result[i], theirs(images[i], float(magnitude[i])), rtol=0, atol=2e-5)
    changed = bool((result - images).abs().amax() > 1e-3)
    assert changed == (name != "identity" and (name, channels) != ("colour", 1))


def test_the_operations_and_their_ranges_are_fixmatchs_table() -> None:
    assert {name: (low, high) for name, (_, low, high) in OPERATIONS.items()} == {
        name: (low, high) for name, (low, high, _) in TABLE.items()
    }


def distorted(images: Tensor, index: Tensor, seed: int = 3, epoch: int = 1, view: int = 1) -> Tensor:
    """What RandAugment makes of images, before it is normalised."""
    normalised = WHOLE(WholeBatch(index, seed, epoch, images), view)
    mean, deviation = torch.tensor(color.IMAGENET_MEAN), torch.tensor(color.IMAGENET_STD)
    return normalised * deviation.view(3, 1, 1) + mean.view(3, 1, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_whole_view_is_two_operations_and_a_square_as_drawn_and_every_operation_occurs(channels: int) -> None:
    images, index = pictures(400, channels), torch.arange(400)
    result = distorted(images, index)
    occurred = Counter()
    for i in range(400):
        draw = RandomStream(3, 1, index[i : i + 1], 1, RandomCrop.draws)
        numbers, shares, (side, row, column) = draw(2)[0], draw(2)[0].tolist(), draw(3)[0].tolist()
        image = images[i].float() / 255
        for number, share in zip(numbers, shares, strict=True):
            name, (low, high, theirs) = list(TABLE.items())[int(14 * number)]
            image = theirs(image, low + (high - low) * share)
            occurred[name] += 1
        top, bottom, left, right = (
            max(0, round(SIDE * (centre + half))) for centre in (row, column) for half in (-side / 4, side / 4)
        )
        image[:, top:bottom, left:right] = 0.5
        # A value next to a threshold may fall on either side.
        differs = (result[i] - image).abs() > 1e-4
        assert differs.float().mean() < 0.01, name
    assert set(occurred) == set(TABLE)
    assert min(occurred.values()) > 800 / 14 / 2


def test_posterising_leaves_any_number_of_bits_from_4_to_8_alike() -> None:
    ramp = torch.linspace(0, 1, SIDE * SIDE).view(1, 1, SIDE, SIDE).expand(1000, -1, -1, -1)
    apply, low, high = OPERATIONS["posterise"]
    result = apply(ramp, low + (high - low) * (torch.arange(1000) + 0.5) / 1000)
    assert Counter(len(image.unique()) for image in result) == {2**bits: 200 for bits in range(4, 9)}


def test_a_view_depends_on_seed_epoch_image_and_view_alone() -> None:
    images, index = pictures(200), torch.arange(100, 300)
    every = distorted(images, index)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([distorted(images[part], index[part]) for part in order.split(7)])
    torch.testing.assert_close(every[order], shuffled, rtol=0, atol=1e-6)
    for change in ("seed", "epoch", "view"):
        assert (distorted(images, index, **{change: 9}) - every).abs().mean() > 0.1
    assert (distorted(images, index + 200) - every).abs().mean() > 0.1


def test_what_is_distorted_is_the_weak_view_of_the_same_crop() -> None:
    images, index, crop = pictures(2000), torch.arange(2000), RandomCrop(16)
    twice_the_identity = (
        (14 * RandomStream(0, 0, index, 1, crop.draws)(2)).long().eq(list(TABLE).index("identity")).all(1)
    )
    batch = WholeBatch(index[twice_the_identity], 0, 0, images[twice_the_identity])
    strong, weak = RandAugment(crop)(batch, 1), Augmentation(crop)(batch, 1)
    kept = ((strong - weak).abs() < 1e-5).all(1).float().mean((1, 2))
    assert len(kept) > 5
    assert kept.min() > 0.7  # the square covers a quarter at most


@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_from_black_to_white_whatever_rounding_does_and_the_images_given_stay(channels: int) -> None:
    noise = torch.rand(400, channels, 33, 33, generator=torch.Generator().manual_seed(0)).round()
    black, white = torch.zeros_like(noise), torch.ones_like(noise)
    for images in (noise, black, white, white + 1e-6):
        given = images.clone()
        result = WHOLE._distort(given, RandomStream(0, 0, torch.arange(400), 1))
        assert result.shape == images.shape
        assert result.min() >= 0
        assert result.max() <= 1
        assert torch.equal(given, images)


def test_the_square_has_the_side_and_the_centre_asked_for_and_is_cut_off_at_the_border() -> None:
    squares = torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 0.75], [0.5, 0.0, 0.999], [0.0, 0.5, 0.5]])
    result = cutout(torch.zeros(4, 3, SIDE, SIDE), *squares.unbind(1))
    expected = torch.zeros(4, 3, SIDE, SIDE)
    expected[0, :, 8:24, 8:24] = 0.5
    expected[1, :, 4:12, 20:28] = 0.5
    expected[2, :, :8, 24:] = 0.5
    assert torch.equal(result, expected)


def test_squares_are_of_any_side_up_to_half_the_images_and_anywhere() -> None:
    """On black images, which the operations leave black."""
    images = torch.zeros(2000, 1, SIDE, SIDE, dtype=torch.uint8)
    grey = (distorted(images, torch.arange(2000))[:, 0] - 0.5).abs() < 1e-3
    rows, columns = grey.any(2), grey.any(1)
    for covered in (rows, columns):
        extent = covered.sum(1)
        assert extent.max() == SIDE // 2
        # Half of the largest on average, a little less for what is cut off at the border.
        assert float(extent.float().mean()) == pytest.approx(0.22 * SIDE, abs=0.02 * SIDE)
        where = covered.float().mean(0)
        assert where.min() > 0.5 * where.max()


def test_a_flat_image_stays_flat_but_for_rounding() -> None:
    flat = 0.7 + 1e-6 * torch.rand(5, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    for function in (color.autocontrast, color.equalize):
        torch.testing.assert_close(function(flat), flat, rtol=0, atol=0.5 / 255)
