"""Several processes compute what one does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from helpers import noise, random_rows, unit
from ranks import learn_each, together
from torch import nn

from cmsf.batch_norm import synchronise
from cmsf.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.data import Dataset
from cmsf.distributed import World, asked_for
from cmsf.recipe import Recipe
from cmsf.recipes import find as find_recipe
from cmsf.rows import UNKNOWN, Rows
from cmsf.shared_bank import ReplicatedBank, ShardedBank

SMALL = {
    "batch_size": 16,
    "bank_size": 64,
    "size": 12,
    "projection_hidden": 16,
    "projection_dim": 8,
    "precision": "fp64",
    "epochs": 4,
}
METHODS: dict[str, dict[str, Any]] = {
    "cmsf-self": {},
    "cmsf-sup": {},
    "cmsf-sup-all": {"include_query": False},
    "cmsf-semi": {"pseudo_threshold": 0.4},
    "cmsf-semi offline": {"pseudo_threshold": 0.4, "pseudo_cache": "offline"},
    "cmsf-self with extra crops": {"extra_crops": 2, "extra_size": 8},
    "cmsf-self by a third view": {"companions": "third-view"},
    "simclr": {},
    "supcon": {},
    "nnclr": {},
    "moco-v2": {},
}


def recipe_of(method: str) -> Recipe:
    changes = SMALL | METHODS[method]
    if method == "simclr":
        changes.pop("bank_size")
    return find_recipe(f"{method.split()[0]}-small", small_images=True).changed(changes)


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance, equal_nan=True, msg=name)
        else:
            assert value == other[name]


def images_for(method: str) -> Dataset:
    """Of three classes; for few labels, every other image has none."""
    data = noise(80, 8)
    if not method.startswith("cmsf-semi"):
        return data
    label = torch.where(torch.arange(80) % 2 == 0, data.train.label, UNKNOWN)
    return replace(data, train=replace(data.train, label=label))


STEPS = 20
SEARCHING = ("cmsf-self", "cmsf-sup", "cmsf-sup-all", "cmsf-semi", "nnclr")
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def alone() -> Results:
    torch.set_num_threads(1)
    return learn_each(World(), {method: (recipe_of(method), images_for(method), STEPS) for method in METHODS})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Any] = {method: (recipe_of(method), images_for(method), STEPS) for method in METHODS}
    jobs |= {f"{method}, sharded": (recipe_of(method), images_for(method), STEPS, True) for method in SEARCHING}
    return together(2, learn_each, jobs, into=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs: dict[str, Any] = {method: (recipe_of(method), images_for(method), STEPS) for method in SEARCHING}
    jobs |= {f"{method}, sharded": (recipe_of(method), images_for(method), STEPS, True) for method in SEARCHING}
    return together(3, learn_each, jobs, into=tmp_path_factory.mktemp("three"))


def assert_same_learning(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_close(one["encoders"], other["encoders"], 1e-9)
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_compute_what_one_does(method: str, alone: Results, two_ranks: list[Results]) -> None:
    for rank in two_ranks:
        assert_same_learning(rank[method], alone[method])
    assert_close(two_ranks[0][method]["bank"], alone[method]["bank"], 1e-9)


@pytest.mark.parametrize("method", SEARCHING)
def test_a_bank_in_two_parts_finds_what_a_whole_one_does(method: str, alone: Results, two_ranks: list[Results]) -> None:
    for rank in two_ranks:
        assert_same_learning(rank[f"{method}, sharded"], alone[method])
    assert_close(two_ranks[0][f"{method}, sharded"]["bank"], alone[method]["bank"], 1e-9)


@pytest.mark.parametrize("kind", ["", ", sharded"])
@pytest.mark.parametrize("method", SEARCHING)
def test_shares_of_a_batch_need_not_be_equal(
    method: str, kind: str, alone: Results, three_ranks: list[Results]
) -> None:
    for rank in three_ranks:  # 16 images: 6, 5 and 5
        assert_same_learning(rank[method + kind], alone[method])
    assert_close(three_ranks[0][method + kind]["bank"], alone[method]["bank"], 1e-9)
