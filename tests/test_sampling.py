"""The labelled images beside a batch: whose they are, and that chance alone decides which."""

import pytest
import torch
from torch import Tensor

from cmsf.data import SupportSampler
from cmsf.utils.constants import UNKNOWN

# Classes of 4, 8, 8 and 12 labelled images in no order; class 2 has none, and a third of the images have no label.
SIZES = {0: 4, 1: 8, 3: 8, 4: 12}
LABELLED = sum(SIZES.values())
LABEL = torch.cat([torch.full((size,), number) for number, size in SIZES.items()] + [torch.full((16,), UNKNOWN)])
LABEL = LABEL[torch.randperm(len(LABEL), generator=torch.Generator().manual_seed(0))]
MEMBERS = {number: [i for i, label in enumerate(LABEL.tolist()) if label == number] for number in SIZES}
STEPS = 320


def drawn(classes: int, images: int, seed: int = 0, steps: int = STEPS) -> list[Tensor]:
    support = SupportSampler(LABEL, classes, images, seed)
    return [support(step) for step in range(steps)]


@pytest.mark.parametrize(("classes", "images"), [(1, 1), (2, 3), (3, 4), (4, 4)])
def test_a_step_has_so_many_classes_and_so_many_of_each(classes: int, images: int) -> None:
    for index in drawn(classes, images, steps=50):
        present, count = LABEL[index].unique(return_counts=True)
        assert len(present) == classes
        assert count.tolist() == [images] * classes
        assert UNKNOWN not in present


@pytest.mark.parametrize("images", [1, 7, LABELLED])
def test_without_a_number_of_classes_a_step_has_so_many_images_in_all(images: int) -> None:
    for index in drawn(0, images, steps=50):
        assert len(index) == images
        assert (LABEL[index] != UNKNOWN).all()


@pytest.mark.parametrize(("classes", "images"), [(0, 20), (0, LABELLED), (3, 4), (4, 4)])
def test_no_image_comes_twice_in_a_step(classes: int, images: int) -> None:
    for index in drawn(classes, images, steps=50):
        assert len(index.unique()) == len(index)


@pytest.mark.parametrize(("classes", "images"), [(0, 6), (2, 3), (4, 2)])
def test_seed_and_step_alone_decide_and_each_of_them_does(classes: int, images: int) -> None:
    first = drawn(classes, images, seed=1, steps=20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        # Another object, asked in another order, in another random state.
        again = SupportSampler(LABEL, classes, images, 1)
        backwards = [again(step) for step in reversed(range(20))][::-1]
    assert all(torch.equal(one, other) for one, other in zip(first, backwards, strict=True))
    # Other images, not the same ones in another order.
    here, elsewhere = ([frozenset(index.tolist()) for index in some] for some in (first, drawn(classes, images, 2, 20)))
    assert len(set(here)) == 20
    assert not any(one == other for one, other in zip(here, elsewhere, strict=True))


def assert_even(count: Tensor, expected: float, chance: float) -> None:
    """Nobody is five deviations of a fair draw off, and all together are as uneven as chance makes them, no more."""
    deviation = (STEPS * chance * (1 - chance)) ** 0.5
    off = (count - expected) / deviation
    assert off.abs().max() < 5
    assert off.square().mean() < 3


def counts(steps: list[Tensor]) -> Tensor:
    return torch.cat(steps).bincount(minlength=len(LABEL)).double()


def test_every_labelled_image_comes_up_as_often_as_any_other() -> None:
    count = counts(drawn(0, 8))
    assert (count[LABEL == UNKNOWN] == 0).all()
    assert_even(count[LABEL != UNKNOWN], STEPS * 8 / LABELLED, 8 / LABELLED)


def test_every_class_comes_up_as_often_as_any_other_and_so_does_every_image_of_it() -> None:
    steps = drawn(2, 3)
    count = counts(steps)
    assert (count[LABEL == UNKNOWN] == 0).all()
    chosen = torch.stack([(LABEL[torch.cat(steps)] == number).sum() / 3 for number in SIZES])
    assert_even(chosen, STEPS * 2 / 4, 2 / 4)
    for number, size in SIZES.items():
        chance = 2 / 4 * 3 / size
        assert_even(count[MEMBERS[number]], STEPS * chance, chance)


def test_what_is_drawn_of_one_class_says_nothing_of_another_or_of_the_next_step() -> None:
    """Classes 1 and 3 are of eight: were they drawn by one hash, they would be drawn at the same places."""
    support = SupportSampler(LABEL.where((LABEL == 1) | (LABEL == 3), UNKNOWN), 2, 1, seed=0)
    together, following = torch.zeros(8, 8), torch.zeros(8, 8)
    before = None
    for step in range(STEPS):
        at = {int(LABEL[image]): MEMBERS[int(LABEL[image])].index(image) for image in support(step).tolist()}
        together[at[1], at[3]] += 1
        if before is not None:
            following[before, at[1]] += 1
        before = at[1]
    for pairs in (together, following):
        expected = pairs.sum() / 64
        # Chi-squared of 63 degrees of freedom is above 110 in one case of four thousand.
        assert ((pairs - expected).square() / expected).sum() < 110
