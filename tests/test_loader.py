"""Images that are read while training: by other processes, in any number, with faults."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.popen_fork import Popen
from multiprocessing.resource_sharer import _ResourceSharer
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import cmsf_command
from helpers import write_photos
from PIL import Image
from runs import TINY, StopAt, assert_same_run, metrics

import cmsf
from cmsf.data import Dataset, Split, Unreadable, load_batches, open_source
from cmsf.data.loader import _BatchDataset
from cmsf.data.prepare import load_dataset
from cmsf.data.sampling import epoch_order
from cmsf.data.transforms import CenterCrop, CroppedBatch, RandomCrop, WholeBatch, crop_views
from cmsf.recipes.recipe import Recipe
from cmsf.training import validation
from cmsf.training.signals import Stopped
from cmsf.utils.errors import BadInput

CROPS = {0: RandomCrop(24), 1: RandomCrop(24), 2: RandomCrop(16, (0.05, 0.14))}
DIED = "a process that decodes images died (SIGKILL, as where memory runs out); new ones read on from where it was"
SMALL = TINY | {"size": 16, "batch_size": 16, "epochs": 2, "cache": "off"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other beside the workers would cost more than these small networks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), per_class=20, classes=3)


def opened(folder: Path, cache: str) -> Dataset:
    return load_dataset(open_source(folder), Recipe(cache=cache), 24)


def read(split: Split, workers: int, say: Callable[[str], None] = pytest.fail) -> list[CroppedBatch]:
    plan = [(epoch, index) for epoch in (0, 3) for index in split.order(1, epoch).split(7)]
    batches = list(load_batches(split, plan, CROPS, seed=5, device="cpu", workers=workers, warn=say))
    assert [(batch.epoch, batch.index.tolist()) for batch in batches] == [(e, i.tolist()) for e, i in plan]
    return batches


def assert_same_batches(ones: list[CroppedBatch], others: list[CroppedBatch]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.crops.keys() == other.crops.keys() == CROPS.keys()
        for view in CROPS:
            assert torch.equal(one.crops[view], other.crops[view])


def test_what_a_batch_holds_does_not_depend_on_the_number_of_workers(photos: Path) -> None:
    split = opened(photos, "off").train
    alone = read(split, 0)
    for workers in (1, 2):
        assert_same_batches(alone, read(split, workers))


def test_a_worker_is_dead_when_its_files_are_closed_though_it_cannot_be_waited_for_yet(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = opened(photos, "off").train
    parent, poll, fetch = os.getpid(), Popen.poll, _ResourceSharer.get_connection
    killed: list[int] = []
    looked: list[float] = []

    def kill_and_fetch(ident: Any) -> Any:
        """The worker has put a batch into the queue; what it holds is still to be fetched."""
        if os.getpid() == parent and not killed:
            (worker,) = multiprocessing.active_children()
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)
            wait([worker.sentinel])
        return fetch(ident)

    def late(self: Popen, flag: int = os.WNOHANG) -> int | None:
        """As the kernel of a busy machine, which needs a while from the last file to the exit code."""
        if self.pid in killed and self.returncode is None and flag == os.WNOHANG:
            looked.append(time.monotonic())
            if looked[-1] < looked[0] + 1:
                return None
        return poll(self, flag)

    monkeypatch.setattr(_ResourceSharer, "get_connection", staticmethod(kill_and_fetch))
    monkeypatch.setattr(Popen, "poll", late)
    said: list[str] = []
    assert_same_batches(read(split, 0), read(split, 1, said.append))
    assert looked
    assert said == [DIED]


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_dies_is_replaced_though_the_parent_ignores_its_children(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, cut, died = opened(photos, "off").train, _BatchDataset.__getitem__, tmp_path / "died"
    alone = read(split, 0)

    def dies_once(self: _BatchDataset, entry: Any) -> Any:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return cut(self, entry)

    monkeypatch.setattr(_BatchDataset, "__getitem__", dies_once)
    before, said = signal.signal(signal.SIGCHLD, signal.SIG_IGN), list[str]()
    try:
        assert_same_batches(alone, read(split, 1, said.append))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert said == [DIED]


def test_photos_in_memory_are_cut_like_those_on_the_disk(photos: Path) -> None:
    """For views of this size the photos are kept as large as they are, so memory and disk hold the same pixels."""
    in_memory, on_disk = (load_dataset(open_source(photos), Recipe(cache=cache), 60).train for cache in ("ram", "off"))
    assert isinstance(in_memory.images, list)
    plan = [(0, torch.arange(12))]
    cuts = [
        next(load_batches(split, plan, {0: RandomCrop(60)}, seed=1, device="cpu", workers=1))
        for split in (in_memory, on_disk)
    ]
    assert torch.equal(cuts[0].crops[0], cuts[1].crops[0])


def test_a_batch_is_what_its_images_show(photos: Path) -> None:
    split = opened(photos, "off").train
    (batch,) = load_batches(split, [(0, torch.tensor([3, 1]))], {0: CenterCrop(24)}, seed=0, device="cpu", workers=1)
    whole = [split.images.decode(i, 48) for i in (3, 1)]
    expected = crop_views(whole, torch.tensor([3, 1]), {0: CenterCrop(24)}, 0, 0)[0].float() / 255
    assert torch.equal(batch.crop(CenterCrop(24), 0), expected)


def test_images_of_one_size_in_memory_go_whole(tmp_path: Path) -> None:
    for i in range(12):
        Image.new("RGB", (20, 20), (20 * i, 0, 0)).save(tmp_path / f"{i:02d}.png")
    split = opened(tmp_path, "ram").train
    (batch,) = load_batches(split, [(0, torch.tensor([4, 2]))], CROPS, seed=0, device="cpu", workers=2)
    assert isinstance(batch, WholeBatch)
    assert batch.images[:, 0, 0, 0].tolist() == [80, 40]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_image_that_cannot_be_read_is_named(photos: Path, workers: int) -> None:
    split = opened(photos, "off").train
    gone = photos / split.paths[9]
    content = gone.read_bytes()
    gone.unlink()
    try:
        plan = ((0, index) for index in torch.arange(20).split(4))
        with pytest.raises(Unreadable, match="no such file") as caught:
            list(load_batches(split, plan, CROPS, seed=0, device="cpu", workers=workers))
        assert caught.value.path == split.paths[9]
    finally:
        gone.write_bytes(content)


def test_a_run_from_the_disk_is_the_same_with_any_number_of_workers(photos: Path, tmp_path: Path) -> None:
    runs = [
        cmsf.train("cmsf-self-small", photos, tmp_path / f"{workers}", quiet=True, workers=workers, **SMALL)
        for workers in (0, 1, 2)
    ]
    assert runs[0].recipe.cache == "off"
    for run in runs[1:]:
        assert_same_run(runs[0], run)
    shown = metrics(runs[0], "epoch")[-1]
    assert runs[0].evaluate("knn", workers=1) == {name: shown[name] for name in ("1-nn", "20-nn", "20-nn weighted")}


@pytest.mark.parametrize("companions", ["previous-epoch", "third-view"])
def test_a_run_from_the_disk_that_was_stopped_goes_on_bit_for_bit(
    photos: Path, tmp_path: Path, companions: str
) -> None:
    settings = SMALL | {"companions": companions, "extra_crops": 2, "workers": 2}
    whole = cmsf.train("cmsf-self-small", photos, tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", photos, tmp_path / "parts", screen=StopAt(4, signal.SIGTERM), **settings)
    parts = cmsf.train("cmsf-self-small", photos, tmp_path / "parts", quiet=True, **settings)
    assert_same_run(whole, parts)


def test_a_group_that_is_interrupted_saves_and_leaves_no_worker_behind(photos: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group, workers too."""
    given = ("--cache", "off", "--workers", "2", "--epochs", "2000", "--batch-size", "16", "--evaluate-every", "0")
    where = ("--data", photos, "--out", tmp_path / "run")
    process = cmsf_command("train", "msf-small", *where, *given, "--threads", "1")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run" / "checkpoints").glob("*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "the same command resumes" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def damaged(folder: Path) -> Path:
    """Photos of which one, in some class, breaks off in the middle."""
    write_photos(folder, per_class=20, classes=3)
    broken = sorted(folder.rglob("*.jpg"))[17]
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 3])
    return broken


def test_a_broken_photo_stops_a_run_from_memory_before_it_starts(tmp_path: Path) -> None:
    broken = damaged(tmp_path / "photos")
    with pytest.raises(BadInput, match=rf"cannot read 1 image \({broken.parent.name}/{broken.name}"):
        cmsf.train("msf-small", tmp_path / "photos", tmp_path / "run", quiet=True, **(SMALL | {"cache": "ram"}))
    assert not (tmp_path / "run").exists()


def test_a_broken_photo_stops_a_run_from_the_disk_at_its_first_read_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "FEWEST", 1000)  # or views of all images would be compared before the first step
    broken = damaged(tmp_path / "classes")
    (tmp_path / "photos").mkdir()
    for file in (tmp_path / "classes").rglob("*.*"):  # without classes, for k-NN before the first step reads them all
        file.rename(tmp_path / "photos" / f"{file.parent.name}-{file.name}")
    broken = tmp_path / "photos" / f"{broken.parent.name}-{broken.name}"
    whole = Image.new("RGB", (90, 80), "red")
    with pytest.raises(BadInput, match=rf"{broken.name}.* the same command resumes from step"):
        cmsf.train("msf-small", tmp_path / "photos", tmp_path / "run", quiet=True, workers=1, **SMALL)
    run = cmsf.Run(tmp_path / "run")
    assert list(run.folder.checkpoints.iterdir())
    whole.save(broken)
    cmsf.train("msf-small", tmp_path / "photos", tmp_path / "run", quiet=True, workers=1, **SMALL)
    assert run.folder.is_complete()


@pytest.mark.parametrize("cache", ["ram", "off"])
def test_a_broken_photo_may_be_left_out_and_is_listed(tmp_path: Path, cache: str) -> None:
    broken = damaged(tmp_path / "photos")
    settings = SMALL | {"cache": cache, "skip_broken": True, "workers": 1}
    run = cmsf.train("msf-small", tmp_path / "photos", tmp_path / "run", quiet=True, **settings)
    listed = run.folder.broken_file.read_text().splitlines()
    assert listed[0] == "split,path,reason"
    assert [line.split(",")[1] for line in listed[1:]] == [f"{broken.parent.name}/{broken.name}"]
    data = run.data()
    assert len(data.train) + len(data.test) == 59
    assert run.evaluate("knn", workers=0)["1-nn"] == metrics(run, "epoch")[-1]["1-nn"]
    Image.new("RGB", (90, 80), "red").save(broken)
    if cache == "ram":  # once mended, it is one image more; from the disk, what was left out stays out
        with pytest.raises(BadInput, match="have changed since"):
            run.data()
    else:
        assert len(run.data().train) == len(data.train)


def test_what_lies_in_blocks_is_read_from_a_few_blocks_at_a_time() -> None:
    blocks = torch.arange(40).repeat_interleave(25)
    order = epoch_order(blocks, 1000, seed=0, epoch=0)
    assert sorted(order.tolist()) == list(range(1000))
    for window in blocks[order].split(200):  # eight blocks of twenty-five
        assert len(window.unique()) == 8
    assert len(blocks[order][:25].unique()) > 4  # mixed within the window
    assert not torch.equal(order, epoch_order(blocks, 1000, seed=0, epoch=1))
    assert torch.equal(order, epoch_order(blocks, 1000, seed=0, epoch=0))


def test_multi_crop_gives_the_online_encoder_more_to_see_and_changes_the_large_crops(
    tmp_path: Path, photos: Path
) -> None:
    settings = SMALL | {"epochs": 1, "evaluate_every": 0, "log_every": 1, "workers": 0}
    settings |= {"cache": "ram", "extra_crops": 2, "size": 28, "weak_crop": "auto", "strong_crop": "auto"}
    same_crops = {"weak_crop": 0.14, "strong_crop": 0.14}
    run = cmsf.train("msf-small", photos, tmp_path / "run", quiet=True, **settings)
    assert (run.recipe.weak_crop, run.recipe.strong_crop, run.recipe.extra_size) == (0.14, 0.14, 12)
    plain = cmsf.train("msf-small", photos, tmp_path / "plain", quiet=True, **(settings | {"extra_crops": 0}))
    assert (plain.recipe.weak_crop, plain.recipe.strong_crop) == (0.2, 0.2)
    single = cmsf.train(
        "msf-small", photos, tmp_path / "one", quiet=True, **(settings | same_crops | {"extra_crops": 0})
    )
    assert metrics(run, "step")[0]["loss"] != metrics(single, "step")[0]["loss"]
