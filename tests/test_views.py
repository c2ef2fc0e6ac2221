"""Every operation against torchvision's, with the same parameters."""

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from cmsf import views
from cmsf.views import Augmentation, clean_view, crop_and_resize

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
        (views.brightened, reference.adjust_brightness, 0.0, 2.0),
        (views.contrasted, reference.adjust_contrast, 0.0, 2.0),
        (views.saturated, reference.adjust_saturation, 0.0, 2.0),
        (views.hue_shifted, reference.adjust_hue, -0.5, 0.5),
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
    result = views.blurred(images, sigma, kernel)
    for i in range(5):
        expected = reference.gaussian_blur(images[i], [kernel, kernel], [float(sigma[i])])
        torch.testing.assert_close(result[i], expected, **EXACT)


def test_the_blur_kernel_is_odd_and_about_a_tenth() -> None:
    assert [views.blur_kernel_size(size) for size in (16, 28, 32, 64, 128, 224)] == [3, 3, 3, 7, 13, 23]


def test_grey_images_are_what_colour_images_with_equal_channels_are() -> None:
    grey = pictures(16, 1, 20, 20)
    strong = Augmentation(16, jitter=1.0, greyscale=0.5, blur=1.0, hue=0.0)
    arguments = {"index": torch.arange(16), "seed": 0, "epoch": 0, "view": 1}
    as_grey, as_colour = strong(grey, **arguments), strong(grey.expand(-1, 3, -1, -1), **arguments)
    # The luminance weights that torchvision uses add up to 0.9999.
    torch.testing.assert_close(as_grey, as_colour, rtol=0, atol=3e-3)


def test_a_view_depends_on_seed_epoch_image_and_view_alone() -> None:
    images, index = pictures(20, 3, 24, 24), torch.arange(100, 120)
    strong = Augmentation(16, jitter=0.8, greyscale=0.2, blur=0.5)
    key = {"seed": 1, "epoch": 2, "view": 1}
    whole = strong(images, index, **key)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([strong(images[part], index[part], **key) for part in order.split(7)])
    torch.testing.assert_close(whole[order], shuffled, rtol=0, atol=1e-6)
    for change in ("seed", "epoch", "view"):
        assert (strong(images, index, **(key | {change: 9})) - whole).abs().mean() > 0.1


def test_images_of_many_sizes_are_viewed_like_each_one_alone() -> None:
    several = [pictures(1, 3, 30, 50)[0], pictures(1, 3, 64, 20)[0], pictures(1, 1, 17, 17)[0]]
    weak = Augmentation(16)
    together = weak(several, torch.arange(3), seed=0, epoch=0, view=0)
    for i, picture in enumerate(several):
        alone = weak(picture[None], torch.tensor([i]), seed=0, epoch=0, view=0)
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-6)


def test_random_crops_keep_to_the_shares_and_ratios_asked_for() -> None:
    images = pictures(1, 1, 200, 100).expand(4000, -1, -1, -1)
    drawn = views._Draws(0, 0, torch.arange(4000), 0)
    top, left, height, width = Augmentation(32, crop_scale=(0.3, 0.6))._boxes(images, drawn).unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 200).all()
    assert (left + width <= 100).all()
    share, ratio = height * width / 20_000, width / height
    assert share.min() > 0.29
    assert share.max() < 0.61
    assert ratio.min() > 0.73
    assert ratio.max() < 1.36


def test_a_crop_that_cannot_fit_falls_back_to_the_largest_central_one() -> None:
    images = pictures(1, 1, 400, 10).expand(3, -1, -1, -1)
    boxes = Augmentation(32, crop_scale=(1.0, 1.0))._boxes(images, views._Draws(0, 0, torch.arange(3), 0))
    assert boxes.tolist() == [[193, 0, 13, 10]] * 3


def test_the_clean_view_is_resize_and_centre_crop_and_small_images_are_used_whole() -> None:
    large = pictures(2, 3, 512, 512)
    resized = reference.resize(large.float() / 255, [256], antialias=True)
    expected = views.normalise(reference.center_crop(resized, [224]))
    # Cropping before resizing differs from resizing before cropping at the crop's border alone.
    torch.testing.assert_close(clean_view(large, 224)[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2], rtol=0, atol=1e-4)
    small = pictures(2, 3, 28, 28)
    torch.testing.assert_close(clean_view(small, 28), views.normalise(small.float() / 255), **EXACT)
