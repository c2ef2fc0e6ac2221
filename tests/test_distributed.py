"""Several processes compute what one does."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import oracle
import pytest
import runs
import torch
from forked import PATIENCE
from helpers import noise, random_rows, write_npz, write_photos
from ranks import Ended, in_ranks, learn_each, together, train, training
from torch import nn

import cmsf
from cmsf.cli import main
from cmsf.data import Dataset
from cmsf.method.bank import EmbeddingCache
from cmsf.method.build import make_learner
from cmsf.method.constraints import Constraint, NearCompanion, SameLabel, Unconstrained
from cmsf.method.distributed_bank import ReplicatedBank, ShardedBank
from cmsf.method.learner import Learner
from cmsf.method.rows import Rows
from cmsf.method.supervision import PseudoLabels
from cmsf.models.sync_batchnorm import synchronize_batchnorm
from cmsf.recipes import get_recipe as find_recipe
from cmsf.recipes.recipe import Recipe
from cmsf.runs import checkpoint
from cmsf.runs.checkpoint import Checkpoint
from cmsf.training import trainer
from cmsf.training.resolve import resolve
from cmsf.training.trainer import Trainer
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World
from cmsf.utils.errors import BadInput
from cmsf.utils.screen import Screen

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
    # KoLeo makes rounding a hundred times larger in ten steps at a tenth of the usual rate.
    "cmsf-self with contrast": {
        "lr": 0.002,
        "objective": "constrained-nce",
        "companion_coverage": 0.9,
        "spread": "koleo",
    },
    "cmsf-sup with contrast": {"lr": 0.02, "objective": "constrained-nce", "spread": "uniformity"},
    "simclr": {},
    "supcon": {},
    "paws": {"support_images": 5},
    "fixmatch": {"support_images": 7, "pseudo_threshold": 0.4},
    "cmsf-self as adapt": {
        "optimiser": "adamw",
        "lr": 3e-4,
        "layer_decay": 0.8,
        "clip_grad": 1.0,
        "freeze_epochs": 1,
        "batch_norm": "frozen",
    },
    "cmsf-self in fp32": {"precision": "fp32"},
}


def recipe_of(method: str) -> Recipe:
    changes = SMALL | METHODS[method]
    if method in ("simclr", "paws", "fixmatch"):
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
    if not method.startswith(("cmsf-semi", "paws", "fixmatch")):
        return data
    label = torch.where(torch.arange(80) % 2 == 0, data.train.label, UNKNOWN)
    return replace(data, train=replace(data.train, label=label))


STEPS = 20
"""Two epochs of five and some; the bank is filled three times."""
SHARDED = ("cmsf-self", "cmsf-sup", "cmsf-sup-all", "cmsf-semi", "cmsf-self with contrast", "cmsf-sup with contrast")
BY_THREE = ("cmsf-self", "cmsf-sup-all")
Results = dict[str, dict[str, Any]]


def job(method: str) -> tuple[Any, ...]:
    """In fp32 another order of summation alone moves weights by a hundredth in a few epochs; there it is one."""
    return recipe_of(method), images_for(method), 1 if method.endswith("fp32") else STEPS


@pytest.fixture(scope="module")
def alone() -> Results:
    torch.set_num_threads(1)
    return learn_each(World(), {method: job(method) for method in METHODS})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs = {method: job(method) for method in METHODS}
    jobs |= {f"{method}, sharded": (*job(method), True) for method in SHARDED}
    return together(2, learn_each, jobs, into=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    jobs = {method: job(method) for method in BY_THREE}
    jobs |= {f"{method}, sharded": (*job(method), True) for method in BY_THREE}
    return together(3, learn_each, jobs, into=tmp_path_factory.mktemp("three"))


def assert_same_learning(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert_close(one["encoders"], other["encoders"], tolerance)
    assert one["losses"] == pytest.approx(other["losses"], abs=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_compute_what_one_does(method: str, alone: Results, two_ranks: list[Results]) -> None:
    tolerance = 1e-5 if method.endswith("fp32") else 1e-9
    for rank in two_ranks:
        assert_same_learning(rank[method], alone[method], tolerance)
    assert_close(two_ranks[0][method]["bank"], alone[method]["bank"], tolerance)


@pytest.mark.parametrize("method", SHARDED)
def test_a_bank_in_two_parts_finds_what_a_whole_one_does(method: str, alone: Results, two_ranks: list[Results]) -> None:
    for rank in two_ranks:
        assert_same_learning(rank[f"{method}, sharded"], alone[method])
    assert_close(two_ranks[0][f"{method}, sharded"]["bank"], alone[method]["bank"], 1e-9)


@pytest.mark.parametrize("kind", ["", ", sharded"])
@pytest.mark.parametrize("method", BY_THREE)
def test_shares_of_a_batch_need_not_be_equal(
    method: str, kind: str, alone: Results, three_ranks: list[Results]
) -> None:
    for rank in three_ranks:  # 16 images: 6, 5 and 5
        assert_same_learning(rank[method + kind], alone[method])
    assert_close(three_ranks[0][method + kind]["bank"], alone[method]["bank"], 1e-9)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
    return made.extend([nn.Linear(144, 6), nn.BatchNorm1d(6, affine=False, momentum=None)]).double()


def one_pass(world: World, images: torch.Tensor) -> dict[str, Any]:
    """Forwards and backwards through layers with BatchNorm, on one's share of the images."""
    layers = synchronize_batchnorm(network(), world, torch.device("cpu"))
    mine = images[world.chunk(len(images))].requires_grad_()
    output = world.gather(layers(mine))
    (output**3).sum().backward()
    world.all_reduce_gradients(layers.parameters())
    layers.eval()
    return {
        "output": output.detach(),
        "in eval mode": layers(images).detach(),
        "images": world.gather(mine.grad),
        **{name: parameter.grad for name, parameter in layers.named_parameters()},
        **layers.state_dict(),
    }


def test_batch_norm_over_ranks_is_batch_norm_over_the_whole_batch(tmp_path: Path) -> None:
    images = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = one_pass(World(), images.clone())
    for rank in together(2, one_pass, images, into=tmp_path):
        assert_close(rank, alone, 1e-12)


def shuffled(world: World, images: torch.Tensor) -> dict[str, Any]:
    """The target's embeddings of a batch with ShuffleBN, after one pass, and what BatchNorm has seen of it."""
    recipe, data = recipe_of("cmsf-self").changed({"batch_norm": "shuffle"}), noise(80, 8)
    learner = make_learner(resolve(recipe, data, 12), data.train.label, "cpu", world=world)
    mine = images[world.chunk(len(images))]
    target = learner.encoders.target
    assert target is not None
    return {"u": learner._embed(mine).gather(world).embedding, "mean": target.backbone.stem[1].running_mean}


def test_with_shuffle_bn_the_target_sees_shares_that_mix_those_of_the_online_encoder(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ranks = together(2, shuffled, images, into=tmp_path)
    assert torch.equal(ranks[0]["u"], ranks[1]["u"])
    for rank, seen in enumerate(ranks):
        alone = shuffled(World(), images[rank::2])  # every other image is a share of the target's
        torch.testing.assert_close(seen["u"][rank::2], alone["u"])
        torch.testing.assert_close(seen["mean"], alone["mean"])


def test_a_bank_that_is_compared_with_as_a_whole_cannot_be_sharded() -> None:
    data = noise(80, 8)
    with pytest.raises(BadInput, match="--bank-sharded is for methods that choose neighbours"):
        make_learner(resolve(recipe_of("supcon"), data, 12), data.train.label, "cpu", bank_sharded=True)


def test_processes_share_a_cache_of_half_the_bits() -> None:
    shares = [EmbeddingCache(1001, 512, torch.float16, World(rank, 4)) for rank in range(4)]
    assert sum(len(share.embedding) for share in shares) == 1001
    whole = sum(share.embedding.nbytes + share.changed.nbytes for share in shares)
    assert whole / 1001 * 1_281_167 < 1.4e9  # of ImageNet


CONSTRAINTS: dict[str, Constraint] = {
    "none": Unconstrained(),
    "label": SameLabel(),
    "companion": NearCompanion(7),
    "any companion": NearCompanion(None),
}


def search_both(world: World, rows: Rows, query: Rows) -> dict[str, Any]:
    """What both kinds of banks find, by every constraint, and how far away it is."""
    found = {}
    for kind in (ReplicatedBank, ShardedBank):
        bank = kind(world, 50, rows.embedding.shape[1], rows.companion.shape[1], dtype=torch.float64)  # type: ignore[union-attr]
        for some in torch.arange(len(rows)).split(9):  # it wraps round, and images enter again
            bank.enqueue(rows[some])
        bank.enqueue(query)
        for name, constraint in CONSTRAINTS.items():
            for k in (1, 6, 60, None):
                for include_query in (True, False):
                    near = bank.search(query, constraint, k, include_query)
                    key = f"{kind.__name__} {name} {k} {include_query}"
                    found[key] = {"count": near.count, "mean": near.mean}
                    if near.row is not None:
                        found[key] |= {"row": near.row, "rank": bank.rank(query, near.row[:, 0].clamp_min(0))}
    return found


def test_a_divided_search_equals_the_slow_search_of_the_whole_bank(tmp_path: Path) -> None:
    rows, query = random_rows(70, seed=3, unknown=0.2), random_rows(8, seed=4, unknown=0.2)
    bank = cmsf.MemoryBank(50, 6, 6, dtype=torch.float64)
    for some in torch.arange(70).split(9):
        bank.enqueue(rows[some])
    bank.enqueue(query)
    related = {
        "none": oracle.everything(query, bank.rows()),
        "label": oracle.same_label(query, bank.rows()),
        "companion": oracle.near_companion(query, bank.rows(), 7),
        "any companion": oracle.near_companion(query, bank.rows(), 50),
    }
    for rank in together(3, search_both, rows, query, into=tmp_path):
        for key, near in rank.items():
            name, k, include_query = key.split(" ", 1)[1].rsplit(" ", 2)
            wanted = None if k == "None" else int(k)
            sets = oracle.chosen(query, bank.rows(), related[name], wanted, include_query == "True")
            assert near["count"].tolist() == [len(chosen) for chosen in sets], key
            if wanted is not None:
                assert [[i for i in line if i != UNKNOWN] for line in near["row"].tolist()] == sets, key
            for mean, chosen in zip(near["mean"], sets, strict=True):
                if chosen:
                    torch.testing.assert_close(mean, bank.embedding[chosen].mean(0))
            if wanted is not None:
                assert torch.equal(near["rank"], bank.rank(query, near["row"][:, 0].clamp_min(0))), key


def decide(world: World) -> dict[str, Any]:
    """What processes that round differently agree upon."""
    found: dict[str, Any] = {}
    for kind in (ReplicatedBank, ShardedBank):
        bank = kind(world, 10, 4, 4)
        rows = random_rows(10, seed=0, dim=4)
        rows.companion[:7] = torch.nan
        bank.enqueue(rows)
        found[kind.__name__] = (bank.agree(5 + world.rank), bank.companion_share())

    class Unsure(torch.nn.Module):
        def forward(self, embedding: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.1, 0.86 - 0.02 * world.rank]]).expand(len(embedding), 2)

    label = torch.tensor([0, 1, UNKNOWN, UNKNOWN])
    supervision = PseudoLabels(label, 4, Unsure(), 0.85, offline=True, dtype=torch.float32, world=world)
    supervision.times_trained = 1
    query = Rows(random_rows(4, seed=0, dim=4).embedding, torch.arange(4))
    return found | {"labels": supervision(query, lambda: query.embedding).label}


def test_what_processes_round_differently_is_decided_once(tmp_path: Path) -> None:
    for found in together(3, decide, into=tmp_path):
        assert found["ReplicatedBank"] == found["ShardedBank"] == (5, 0.3)
        assert found["labels"].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World()),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2)),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            World(5, 8, 1, 4),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World()),  # a batch script, which runs once
    ],
)
def test_torchrun_and_slurm_say_who_a_process_is(environment: dict[str, str], world: World) -> None:
    assert World.from_env(environment) == world


@pytest.mark.parametrize("count", [1, 5, 16, 17])
def test_shares_are_all_of_it_and_differ_by_one_at_most(count: int) -> None:
    worlds = [World(rank, 3) for rank in range(3)]
    shares = [list(range(count)[world.chunk(count)]) for world in worlds]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    dealt = torch.cat([world.shard(torch.arange(count)) for world in worlds])
    assert torch.equal(dealt[worlds[0].unshard_order(count)], torch.arange(count))


# What follows are real runs. Their steps are short, or else rounding grows a millionfold in them.

RUN = ("--lr", "0.005", "--batch-size", "16", "--projection-hidden", "16", "--projection-dim", "8", "--size", "12")
EXACT = (*RUN, "--epochs", "8", "--precision", "fp64", "--evaluate-every", "0", "--log-every", "2", "--seed", "3")
"""Four steps an epoch."""


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch += ["--max-restarts", str(restarts), "-m", "cmsf", *training(*arguments)]
    return subprocess.Popen([sys.executable, *launch], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz", per_class=20, classes=4, side=12)


def exactly(bars: Path, out: Path) -> tuple[str, ...]:
    return ("cmsf-self-small", "--data", str(bars), "--out", str(out), *EXACT)


@pytest.fixture(scope="module")
def by_one(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    out = tmp_path_factory.mktemp("one") / "run"
    (done,) = train(1, *exactly(bars, out))
    assert done.code == 0, done.said
    return cmsf.Run(out)


def assert_same_but_for_rounding(one: cmsf.Run, other: cmsf.Run) -> None:
    """Weights, bank and cache in the newest checkpoint, the network, and every number of the log."""
    first, second = (run_state(run) for run in (one, other))
    for part in ("encoders", "bank"):
        assert_close(first["state"][part], second["state"][part], 1e-9)
    torch.testing.assert_close(first["cache"], second["cache"], rtol=0, atol=1e-9, equal_nan=True)
    lines = [[json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()] for run in (one, other)]
    assert len(lines[0]) == len(lines[1])
    for mine, theirs in zip(*lines, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"images_per_second", "pseudo_cost"}:
            assert mine[name] == pytest.approx(theirs[name], abs=1e-9), name


def run_state(run: cmsf.Run) -> dict[str, Any]:
    newest = checkpoint.latest(run.folder.checkpoints)
    assert newest is not None
    contents = Checkpoint.read(newest).load()
    return {"state": contents["state"], "cache": contents["cache"]["embedding"]}


def test_torchrun_trains_what_one_process_does_and_one_speaks(bars: Path, by_one: cmsf.Run, tmp_path: Path) -> None:
    process = torchrun(2, *exactly(bars, tmp_path / "run"))
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert_same_but_for_rounding(cmsf.Run(tmp_path / "run"), by_one)
    assert said.count("epoch   1") == 1
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2


def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_other(
    bars: Path, by_one: cmsf.Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    said = stopped_by_a_scheduler(2, *exactly(bars, out), "--bank-sharded")
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None
    assert Checkpoint.read(newest).step >= json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert said.count("stopped by SIGTERM after a checkpoint") == 2, said
    for done in train(3, *exactly(bars, out)):
        assert done.code == 0, done.said
    assert_same_but_for_rounding(cmsf.Run(out), by_one)


def stopped_by_a_scheduler(ranks: int, *arguments: str) -> str:
    """SIGTERM to torchrun and to all that it has started, which it hands on besides; what they said."""
    out = Path(arguments[arguments.index("--out") + 1])
    process = torchrun(ranks, *arguments)
    wait_for(lambda: lines_of(out) > 1 or process.poll() is not None)
    start = time.monotonic()
    for one in (process.pid, *children(process.pid)):
        os.kill(one, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    return said


def children(parent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def lines_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_killed_ranks_come_back_and_the_result_is_the_same(bars: Path, by_one: cmsf.Run, tmp_path: Path) -> None:
    out, reached = tmp_path / "run", 3
    process = torchrun(2, *exactly(bars, out), restarts=2)
    for which in (1, 0):
        wait_for(lambda: lines_of(out) > reached or process.poll() is not None)  # noqa: B023
        os.kill(children(process.pid)[which], signal.SIGKILL)
        reached = lines_of(out) + 2  # further than the one that was killed
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    for which in (0, 1):
        assert said.count(f"failed (exitcode: -9) local_rank: {which}") == 1
    assert "resuming from step" in said
    assert_same_but_for_rounding(cmsf.Run(out), by_one)


def said_once(ended: list[Ended], words: str) -> bool:
    """Whether the first process alone says something, and all end as those do whose input is bad."""
    assert [one.code for one in ended] == [2] * len(ended), ended
    for one in ended:
        assert "Traceback" not in one.said
        assert "gloo" not in one.said
    assert all("cmsf: " not in one.said for one in ended[1:]), ended
    return ended[0].said.count("cmsf: ") == 1 and words in ended[0].said


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_one_rank_cannot_read_is_said_once_and_stops_all(split: str, tmp_path: Path) -> None:
    """A training image is one rank's; test images are looked at by the first alone."""
    for name, seed in (("train", 0), ("test", 1)):
        write_photos(tmp_path / "photos" / name, per_class=8, classes=2, side=40 + seed)
    lost = sorted((tmp_path / "photos" / split).rglob("*.jpg"))[3]
    lost.write_bytes(b"no image")
    given = ("msf-small", "--data", tmp_path / "photos", "--out", tmp_path / "run", "--cache", "off", "--workers", "0")
    given = (*given, *RUN, "--epochs", "3", "--batch-size", "8", "--evaluate-every", "1")
    ended = train(2, *given)
    assert [one.code for one in ended] == [2, 2], ended
    said = "".join(one.said for one in ended)
    assert said.count(lost.name) == said.count("cmsf: ") == 1, said
    assert "gloo" not in said
    assert "Traceback" not in said
    lost.write_bytes(lost.with_name(sorted(path.name for path in lost.parent.iterdir())[0]).read_bytes())
    ended = train(2, *given)
    assert [one.code for one in ended] == [0, 0], ended


# Faults that all ranks meet. What is done to a run in the middle is done by the ranks themselves.


def at_steps(**actions: Any) -> None:
    """Do something in this process when a step is logged."""
    shown = Screen.step

    def acting(self: Screen, step: int, line: Any) -> None:
        actions.pop(f"step_{step}", lambda: None)()
        shown(self, step, line)

    Screen.step = acting  # type: ignore[method-assign]


def stopped_at(step: int, arguments: list[str]) -> int:
    """The last process alone gets a signal."""
    if World.from_env().rank == World.from_env().size - 1:
        at_steps(**{f"step_{step}": lambda: os.kill(os.getpid(), signal.SIGTERM)})
    return main(arguments)


@pytest.fixture(scope="module")
def half(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was stopped in the middle of an epoch, where a signal reached one of them."""
    out = tmp_path_factory.mktemp("half") / "run"
    for one in in_ranks(2, stopped_at, 22, training(*exactly(bars, out))):
        assert one.code == 128 + signal.SIGTERM, one.said
    return out


def test_two_ranks_resume_a_run_by_its_folder_alone(half: Path, by_one: cmsf.Run, tmp_path: Path) -> None:
    run = cmsf.Run(shutil.copytree(half, tmp_path / "run"))
    ended = train(2, "--resume", run.path)
    assert [one.code for one in ended] == [0, 0], ended
    assert [one.said.count("resuming from step 22 of 32") for one in ended] == [1, 0]
    assert_same_but_for_rounding(run, by_one)


def test_two_ranks_go_on_from_the_checkpoint_before_a_damaged_one_which_one_names(
    half: Path, by_one: cmsf.Run, tmp_path: Path
) -> None:
    run = cmsf.Run(shutil.copytree(half, tmp_path / "run"))
    newest = checkpoint.latest(run.folder.checkpoints)
    assert newest is not None
    state = run.folder.checkpoints / json.loads(newest.read_text())["parts"]["state"]["file"]
    state.write_bytes(state.read_bytes()[:-100])
    ended = train(2, "--resume", run.path)
    assert [one.code for one in ended] == [0, 0], ended
    assert [one.said.count("checkpoint step-00000022.json cannot be used") for one in ended] == [1, 0]
    assert [one.said.count("resuming from step 20 of 32") for one in ended] == [1, 0]
    assert_same_but_for_rounding(run, by_one)


def without_room(first: int, last: int, arguments: list[str]) -> int:
    """From one step to another no file may be so large as a checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full, free = (partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, limits[1])) for size in (50_000, limits[0]))
    at_steps(**{f"step_{first}": full, f"step_{last}": free})
    return main(arguments)


@pytest.mark.parametrize("then", ["stop", "go-on"])
def test_a_full_disk_stops_two_ranks_or_they_go_on_as_they_were_told(
    then: str, bars: Path, by_one: cmsf.Run, tmp_path: Path
) -> None:
    given = (*exactly(bars, tmp_path / "run"), "--on-full-disk", then)
    ended = in_ranks(2, without_room, 6, 10, training(*given))
    if then == "stop":
        assert said_once(ended, "the same command resumes from step 4"), ended
        assert "File too large" in ended[0].said
        assert not list((tmp_path / "run").rglob("*.part"))
        ended = train(2, *given)
    else:
        assert [one.said.count("File too large") for one in ended] == [1, 0], ended
        assert "training continues (--on-full-disk), and the same command resumes from step 4" in ended[0].said
    assert [one.code for one in ended] == [0, 0], ended
    assert_same_but_for_rounding(cmsf.Run(tmp_path / "run"), by_one)


def poisoned(arguments: list[str]) -> int:
    """A weight that is no number before the seventh step; says so when the page about it is written."""
    learn, write, steps = Learner.step, trainer.write_diagnosis, count(1)

    def step(self: Learner, *given: Any) -> Any:
        if next(steps) == 7:
            with torch.no_grad():
                self.encoders.predictor[-1].bias[3] = torch.inf
        return learn(self, *given)

    def page(*given: Any) -> str:
        print("a page is written", file=sys.stderr)
        return write(*given)

    Learner.step, trainer.write_diagnosis = step, page  # type: ignore[method-assign]
    return main(arguments)


def test_two_ranks_whose_loss_is_no_number_say_so_once_and_of_the_whole_batch(bars: Path, tmp_path: Path) -> None:
    ended = in_ranks(2, poisoned, training(*exactly(bars, tmp_path / "run")))
    assert said_once(ended, "the loss is nan after step 6 of 32; the last checkpoint, step-00000004.json"), ended
    assert [one.said.count("a page is written") for one in ended] == [1, 0]
    run = cmsf.Run(tmp_path / "run")
    about = json.loads(run.folder.divergence_file.read_text())
    assert about["not finite"] == {"predictor.3.bias": "1 of 8"}
    assert about["batch"]["index"] == run.data().train.order(3, 1)[32:48].tolist()
    assert len(about["batch"]["path"]) == 16


def test_two_ranks_that_collapse_say_so_once_and_stop_after_a_checkpoint(bars: Path, tmp_path: Path) -> None:
    given = ("byol-small", "--data", bars, "--out", tmp_path / "run", "--on-collapse", "stop", "--weight-decay", "10")
    given = (*given, *RUN, "--lr", "0.2", "--batch-size", "24", "--epochs", "20", "--log-every", "1")
    ended = train(2, *given, "--evaluate-every", "0")
    assert said_once(ended, "with --on-collapse warn, the same command resumes from step"), ended
    assert "nearly the same" in ended[0].said
    run = cmsf.Run(tmp_path / "run")
    assert runs.state(run)["progress"]["step"] == runs.metrics(run, "step")[-1]["step"] < 60


def with_weights_kept(place: Path, stop: int | None, arguments: list[str]) -> int:
    """Each process keeps the parameters that it has at the end."""
    whole = Trainer.fit

    def run(self: Trainer) -> None:
        whole(self)
        weights = {name: weight.detach() for name, weight in self.learner.encoders.named_parameters()}
        torch.save(weights, place / f"{self.world.rank}.pt")

    Trainer.fit = run  # type: ignore[method-assign]
    return main(arguments) if stop is None else stopped_at(stop, arguments)


def test_two_ranks_with_shuffle_bn_have_the_same_weights_and_a_stopped_run_of_them_goes_on_bit_for_bit(
    bars: Path, tmp_path: Path
) -> None:
    given = ("cmsf-self-small", "--data", bars, *EXACT, "--epochs", "3", "--batch-norm", "shuffle", "--log-every", "1")
    parts = training(*given, "--out", tmp_path / "parts")
    for stop, code, arguments in (
        (None, 0, training(*given, "--out", tmp_path / "whole")),
        (5, 128 + signal.SIGTERM, parts),  # before statistics are those of the first again
        (None, 0, parts),
    ):
        ended = in_ranks(2, with_weights_kept, tmp_path, stop, arguments)
        assert [one.code for one in ended] == [code] * 2, ended
        if code == 0:
            first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
            runs.assert_same(first, second)
            assert any(name.startswith("target.") for name in first)
    runs.assert_same_run(cmsf.Run(tmp_path / "whole"), cmsf.Run(tmp_path / "parts"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "are not a rank and a world size"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK 5 is out of range for WORLD_SIZE 2"),
    ],
)
def test_a_launcher_that_says_nonsense_is_told_so(environment: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        World.from_env(environment)


def test_a_batch_smaller_than_the_processes_is_refused(bars: Path, tmp_path: Path) -> None:
    ended = train(3, "msf-small", "--data", bars, "--out", tmp_path / "run", *RUN, "--batch-size", "2")
    assert all(one.code for one in ended), ended
    assert "".join(one.said for one in ended).count("--batch-size 2 is less than 3 processes") == 1, ended
    assert not (tmp_path / "run").exists()
