import os
from collections.abc import Iterator
from functools import partial

# Before torch is there: workers of pytest share the cores; two threads each on two cores would wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import pytest
import torch

LONGEST = (
    "test_distributed",
    "test_faults",
    "test_transfer_search",
    "test_hostile",
    "test_run",
    "test_baselines",
    "test_transfer_ray",
    "test_loader",
    "test_precision",
    "test_checkpoint",
    "test_cli",
    "test_docs",
    "test_finetune",
)
"""Files that take long come first: the others fill up the time in which a worker has nothing else left to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def one_row() -> Iterator[None]:
    """Every run draws its nearest neighbours at the end: eight rows of them take as long as its training."""
    from cmsf.runs import classifier  # not before pytest has put its checks of shapes in front of all modules
    from cmsf.training import trainer

    with pytest.MonkeyPatch.context() as patch:
        for module in (trainer, classifier):
            patch.setattr(module, "draw_neighbours", partial(module.draw_neighbours, rows=1))
        yield


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are about a run's pictures, or are as a user's run in everything."""
    from cmsf.analysis.figures.gallery import draw_neighbours
    from cmsf.runs import classifier
    from cmsf.training import trainer

    for module in (trainer, classifier):
        monkeypatch.setattr(module, "draw_neighbours", draw_neighbours)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For networks so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks every five seconds whether its workers are alive."""
    waiting = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(waiting, "__defaults__", (0.5,))
