"""Signals that come while something else than a step takes its time: it is broken off, and nothing is different."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import write_npz
from runs import TINY, assert_same_run, metrics

import cmsf
from cmsf import training
from cmsf.distributed import World
from cmsf.encoders import Encoders
from cmsf.errors import BadInput, Interrupted
from cmsf.judging import Judge
from cmsf.signals import Caught, Stopped

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = TINY | {"labels_per_class": 8, "pseudo_cache": "offline", "evaluate_every": 1}
FOR_EVER = 60


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


@pytest.fixture(scope="module")
def whole(bars: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    return train(bars, tmp_path_factory.mktemp("whole") / "run")


def train(bars: Path, out: Path) -> cmsf.Run:
    return cmsf.train("cmsf-semi-small", bars, out, quiet=True, **SETTINGS)


def once_signalled(number: signal.Signals, work: Callable[..., Any], nth: int = 1) -> Callable[..., Any]:
    """The work, in the course of which a signal comes the n-th time, and which then takes for ever."""
    calls = 0

    def signalled(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), number)
            time.sleep(FOR_EVER)
        return work(*given, **named)

    return signalled


@pytest.mark.parametrize(
    ("where", "name", "nth", "number"),
    [
        pytest.param(Judge, "_classifier", 2, signal.SIGTERM, id="an evaluation"),
        pytest.param(Encoders, "embed", 3, signal.SIGINT, id="learning what pseudo-labels come of"),
        pytest.param(training, "draw_neighbours", 1, signal.SIGTERM, id="the pictures at the end"),
    ],
)
def test_a_signal_breaks_off_what_takes_long_and_the_same_command_makes_up_for_it(
    bars: Path,
    whole: cmsf.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    nth: int,
    number: signal.Signals,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(where, name, once_signalled(number, getattr(where, name), nth))
        begun = time.monotonic()
        with pytest.raises(Stopped) as stopped:
            train(bars, tmp_path / "run")
        assert time.monotonic() - begun < FOR_EVER
    assert stopped.value.signal_number == number
    assert stopped.value.saved
    assert_same_run(whole, train(bars, tmp_path / "run"))
    steps = [line["step"] for line in metrics(cmsf.Run(tmp_path / "run"), "epoch")]
    assert steps == [4, 8, 12]


def test_a_signal_that_came_before_breaks_off_at_once_and_elsewhere_it_waits() -> None:
    with Caught() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught.signal_number == signal.SIGTERM
        with pytest.raises(Interrupted), caught.interrupting():
            pytest.fail("it was not broken off")
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher hands it on
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_interrupts_one_process_stops_all_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []

    def largest(world: World, *numbers: int) -> tuple[int, ...]:
        met.extend(numbers)
        return (max(met),)

    monkeypatch.setattr(World, "largest", largest)

    def interrupted() -> None:
        raise Interrupted(signal.SIGTERM)

    def refused() -> None:
        raise BadInput("an image is gone")

    world = World(0, 2)
    with pytest.raises(BadInput, match="an image is gone"):
        world.agreed(refused)
    for work in (interrupted, refused, lambda: None):
        with pytest.raises(Interrupted) as error:
            world.agreed(work)
        assert error.value.signal_number == signal.SIGTERM
