"""Every operation against torchvision's, with the same parameters."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from cmsf.data.transforms import (
    Augmentation,
    CenterCrop,
    CroppedBatch,
    RandomCrop,
    WholeBatch,
    clean_view,
    color,
    crop_and_resize,
    crop_views,
)
from cmsf.data.transforms.crops import RandomStream, resized_crop

EXACT = {"rtol": 0, "atol": 2e-6}


def pictures(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def factors(count: int, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [7, 16, 33, 64])
def test_crop_and_resize_is_torchvisions_whether_it_shrinks_or_grows(size: int) -> None:
    images = pictures(4, 3, 40, 52)
    boxes = torch.tensor([[0, 0, 40, 52], [3, 10, 9, 30], [20, 1, 20, 5], [39, 51, 1, 1]])
    flipped = torch.tensor([False, True, False, True])
    result = crop_and_resize(images, boxes, size, flipped)
    for i, (top, left, height, width) in enumerate(boxes.tolist()):
        expected = reference.resized_crop(
            images[i].float() / 255, top, left, height, width, [size, size], antialias=True
        )
        expected = reference.horizontal_flip(expected) if flipped[i] else expected
        torch.testing.assert_close(result[i], expected, **EXACT)


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (color.adjust_brightness, reference.adjust_brightness, 0.0, 2.0),
        (color.adjust_contrast, reference.adjust_contrast, 0.0, 2.0),
        (color.adjust_saturation, reference.adjust_saturation, 0.0, 2.0),
        (color.adjust_hue, reference.adjust_hue, -0.5, 0.5),
    ],
)
def test_colour_operations_are_torchvisions(ours, theirs, low: float, high: float) -> None:
    images = pictures(12, 3, 9, 11).float() / 255
    images[0], images[1, :, 0, 0] = 0.5, 0.0  # a grey image and a black pixel have no hue
    amount = factors(12, low, high)
    result = ours(images, amount)
    for i in range(12):
        torch.testing.assert_close(result[i], theirs(images[i], float(amount[i])), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("side", "kernel"), [(28, 3), (32, 5), (224, 23)])
def test_blur_is_torchvisions(side: int, kernel: int) -> None:
    images = pictures(5, 3, side, side).float() / 255
    sigma = factors(5, 0.1, 2.0)
    result = color.gaussian_blur(images, sigma, kernel)
    for i in range(5):
        expected = reference.gaussian_blur(images[i], [kernel, kernel], [float(sigma[i])])
        torch.testing.assert_close(result[i], expected, **EXACT)


def test_the_blur_kernel_is_odd_and_about_a_tenth() -> None:
    assert [color.blur_kernel_size(size) for size in (16, 28, 32, 64, 128, 224)] == [3, 3, 3, 7, 13, 23]


def test_solarising_is_torchvisions_and_turns_bright_pixels_alone() -> None:
    images, threshold = pictures(4, 3, 9, 11), torch.tensor([0, 64, 128, 255])
    result = color.solarize(images.float() / 255, threshold / 255)
    for i in range(4):
        torch.testing.assert_close(result[i], reference.solarize(images[i], int(threshold[i])).float() / 255, **EXACT)


@pytest.mark.parametrize("size", [7, 33, 64])
def test_cutting_one_image_is_torchvisions_resized_crop_of_its_grey_levels(size: int) -> None:
    image = pictures(1, 3, 40, 52)[0]
    as_decoded = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for top, left, height, width in ([0, 0, 40, 52], [3, 10, 9, 30], [39, 51, 1, 1]):
        expected = reference.resized_crop(image, top, left, height, width, [size, size], antialias=True)
        box = torch.tensor([top, left, height, width])
        assert torch.equal(resized_crop(as_decoded, box, size, flipped=False), expected)
        assert torch.equal(resized_crop(as_decoded, box, size, flipped=True), reference.horizontal_flip(expected))


def strong(size: int, **changes: float) -> Augmentation:
    return Augmentation(RandomCrop(size), **({"jitter": 0.8, "greyscale": 0.2, "blur": 0.5} | changes))


def test_a_whole_strong_view_is_torchvisions_operations_one_after_another() -> None:
    """Every drawn parameter handed to torchvision's functional form, image by image."""
    images, index = pictures(40, 3, 24, 30), torch.arange(40)
    how = strong(16, solarise=0.5)
    result = how(WholeBatch(index, 3, 1, images), 1)
    for i in range(40):
        draw = RandomStream(3, 1, index[i : i + 1], 1)
        boxes, flipped = how.crop.boxes(torch.tensor([24]), torch.tensor([30]), draw)
        image = reference.resized_crop(images[i].float() / 255, *boxes[0].tolist(), [16, 16], antialias=True)
        image = reference.horizontal_flip(image) if flipped else image
        jittered, order, amount = draw(1)[0] < 0.8, draw(4)[0].argsort().tolist(), 2 * draw(4)[0] - 1
        operations = [
            lambda x, a: reference.adjust_brightness(x, 1 + 0.4 * a),
            lambda x, a: reference.adjust_contrast(x, 1 + 0.4 * a),
            lambda x, a: reference.adjust_saturation(x, 1 + 0.4 * a),
            lambda x, a: reference.adjust_hue(x, 0.1 * a),
        ]
        for number in order if jittered else ():
            image = operations[number](image, float(amount[number]))
        image = reference.rgb_to_grayscale(image, 3) if draw(1) < 0.2 else image
        blurs, sigma = bool(draw(1) < 0.5), 0.1 + 1.9 * float(draw(1))
        image = reference.gaussian_blur(image, [3, 3], [sigma]) if blurs else image
        image = reference.solarize(image, 128 / 255) if draw(1) < 0.5 else image
        expected = reference.normalize(image, list(color.IMAGENET_MEAN), list(color.IMAGENET_STD))
        # A pixel next to the threshold of solarising may fall on either side.
        differs = (result[i] - expected).abs() > 1e-4
        assert differs.float().mean() < 0.01


def test_grey_images_are_what_colour_images_with_equal_channels_are() -> None:
    grey, index = pictures(16, 1, 20, 20), torch.arange(16)
    how = strong(16, jitter=1.0, greyscale=0.5, blur=1.0, hue=0.0)
    as_grey = how(WholeBatch(index, 0, 0, grey), 1)
    as_colour = how(WholeBatch(index, 0, 0, grey.expand(-1, 3, -1, -1)), 1)
    # The luminance weights that torchvision uses add up to 0.9999.
    torch.testing.assert_close(as_grey, as_colour, rtol=0, atol=3e-3)


def test_a_view_depends_on_seed_epoch_image_and_view_alone() -> None:
    images, index = pictures(20, 3, 24, 24), torch.arange(100, 120)
    how = strong(16)

    def view(part: Tensor, seed: int = 1, epoch: int = 2, number: int = 1) -> Tensor:
        return how(WholeBatch(index[part], seed, epoch, images[part]), number)

    every = torch.arange(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([view(part) for part in order.split(7)])
    torch.testing.assert_close(view(every)[order], shuffled, rtol=0, atol=1e-6)
    for change in ("seed", "epoch", "number"):
        assert (view(every, **{change: 9}) - view(every)).abs().mean() > 0.1


def test_images_cut_beforehand_are_viewed_like_whole_ones_but_for_rounding_to_grey_levels() -> None:
    images, index, how = pictures(20, 3, 60, 50), torch.arange(20), strong(16, hue=0.0)
    whole = how(WholeBatch(index, 0, 5, images), 1)
    parts = crop_views(list(images), index, {1: how.crop}, 0, 5)
    cut_before = how(CroppedBatch(index, 0, 5, parts, torch.device("cpu")), 1)
    torch.testing.assert_close(cut_before, whole, rtol=0, atol=0.02)


def test_images_of_many_sizes_are_cut_like_each_one_alone() -> None:
    several = [pictures(1, 3, 30, 50)[0], pictures(1, 3, 64, 20)[0], pictures(1, 1, 17, 17)[0]]
    crops = {0: RandomCrop(16), 1: RandomCrop(24, (0.05, 0.14)), 2: CenterCrop(16)}
    together = crop_views(several, torch.arange(3), crops, 0, 0)
    assert [tuple(together[view].shape) for view in crops] == [(3, 3, 16, 16), (3, 3, 24, 24), (3, 3, 16, 16)]
    for i, picture in enumerate(several):
        alone = crop_views([picture], torch.tensor([i]), crops, 0, 0)
        for view in crops:
            assert torch.equal(together[view][i], alone[view][0])


def test_random_crops_keep_to_the_shares_and_ratios_asked_for() -> None:
    height, width = torch.full((4000,), 200), torch.full((4000,), 100)
    drawn = RandomStream(0, 0, torch.arange(4000), 0)
    boxes, flipped = RandomCrop(32, (0.3, 0.6), flip=0.25).boxes(height, width, drawn)
    top, left, tall, wide = boxes.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + tall <= 200).all()
    assert (left + wide <= 100).all()
    share, ratio = tall * wide / 20_000, wide / tall
    assert share.min() > 0.29
    assert share.max() < 0.61
    assert ratio.min() > 0.73
    assert ratio.max() < 1.36
    assert float(flipped.float().mean()) == pytest.approx(0.25, abs=0.03)


def test_a_crop_that_cannot_fit_falls_back_to_the_largest_central_one() -> None:
    height, width = torch.full((3,), 400), torch.full((3,), 10)
    boxes, _ = RandomCrop(32, (1.0, 1.0)).boxes(height, width, RandomStream(0, 0, torch.arange(3), 0))
    assert boxes.tolist() == [[193, 0, 13, 10]] * 3


def test_the_clean_view_is_resize_and_centre_crop_and_small_images_are_used_whole() -> None:
    large = pictures(2, 3, 512, 512)
    resized = reference.resize(large.float() / 255, [256], antialias=True)
    expected = color.normalize_pixels(reference.center_crop(resized, [224]))
    # Cropping before resizing differs from resizing before cropping at the crop's border alone.
    torch.testing.assert_close(clean_view(large, 224)[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2], rtol=0, atol=1e-4)
    small = pictures(2, 3, 28, 28)
    torch.testing.assert_close(clean_view(small, 28), color.normalize_pixels(small.float() / 255), **EXACT)
