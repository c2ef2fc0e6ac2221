import torch

from cmsf.utils.rng import permutation, uniform


def test_a_number_depends_on_its_key_alone() -> None:
    images = torch.arange(100)
    together = uniform(5, 1, 2, images)
    apart = torch.cat([uniform(5, 1, 2, images[i : i + 1]) for i in reversed(range(100))]).flip(0)
    assert torch.equal(together, apart)
    assert torch.equal(uniform(9, 1, 2, images)[:, :5], together)


def test_every_part_of_the_key_matters() -> None:
    images = torch.arange(1000)
    draws = [uniform(1, seed, epoch, images, view) for seed in (0, 1) for epoch in (0, 1) for view in (0, 1)]
    for i, first in enumerate(draws):
        for second in draws[i + 1 :]:
            assert (first == second).float().mean() < 0.01
            assert abs(torch.corrcoef(torch.stack([first[:, 0], second[:, 0]]))[0, 1]) < 0.12


def test_numbers_are_uniform() -> None:
    draws = uniform(4, 7, torch.arange(50_000))
    assert draws.min() >= 0
    assert draws.max() < 1
    share = torch.histc(draws, 20, 0, 1) / draws.numel()
    assert (share - 0.05).abs().max() < 0.002


def test_a_permutation_has_every_image_once_and_changes_with_the_epoch() -> None:
    first, second = permutation(5000, 3, 0), permutation(5000, 3, 1)
    assert torch.equal(first.sort().values, torch.arange(5000))
    assert (first == second).float().mean() < 0.01
    assert torch.equal(first, permutation(5000, 3, 0))
