"""Signals that come while something else than a step takes its time: it is broken off, and nothing is different."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import write_npz
from runs import TINY, assert_same_run, metrics

import cmsf
from cmsf.models.encoders import Encoders
from cmsf.training import trainer
from cmsf.training.signals import SignalHandler, Stopped
from cmsf.training.validation import Validator
from cmsf.utils.distributed import FullDiskElsewhere, World
from cmsf.utils.errors import BadInput, FailedElsewhere, Interrupted
from cmsf.utils.files import FullDisk

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
        pytest.param(Validator, "_classifier", 2, signal.SIGTERM, id="an evaluation"),
        pytest.param(Encoders, "embed", 3, signal.SIGINT, id="learning what pseudo-labels come of"),
        pytest.param(trainer, "draw_neighbours", 1, signal.SIGTERM, id="the pictures at the end"),
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
    before = signal.getsignal(signal.SIGTERM)
    with SignalHandler() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught.signal_number == signal.SIGTERM
        with pytest.raises(Interrupted), caught.interruptible():
            pytest.fail("it was not broken off")
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher hands it on
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_stops_one_process_stops_all_at_the_same_place_and_is_said_by_one() -> None:
    def interrupted() -> None:
        raise Interrupted(signal.SIGTERM)

    def refused() -> None:
        raise BadInput("an image is gone")

    def full() -> None:
        raise FullDisk("no room")

    def nothing() -> None:
        return

    assert outcomes(nothing, nothing, nothing) == [None, None, None]
    assert outcomes(nothing, refused, refused) == [FailedElsewhere, BadInput, FailedElsewhere]
    assert outcomes(refused, nothing, full) == [FullDiskElsewhere, FullDiskElsewhere, FullDisk]
    assert outcomes(full, interrupted, refused) == [Interrupted, Interrupted, Interrupted]


def outcomes(*works: Callable[[], None]) -> list[type[Exception] | None]:
    """What each of several processes is stopped by; all of them meet, one after another."""
    meeting = [Meeting(rank, len(works)) for rank in range(len(works))]
    said = [number for world, work in zip(meeting, works, strict=True) for number in world.numbers(work)]
    return [world.outcome(work, max(said)) for world, work in zip(meeting, works, strict=True)]


@dataclass(frozen=True)
class Meeting(World):
    """A process that others are thought of."""

    heard: list[int] = field(default_factory=list)
    largest_of_all: list[int] = field(default_factory=list)

    def all_reduce_max(self, *numbers: int) -> tuple[int, ...]:
        self.heard.extend(numbers)
        return tuple(self.largest_of_all) or numbers

    def numbers(self, work: Callable[[], None]) -> list[int]:
        with suppress(BadInput, Interrupted):
            self.raise_on_all_ranks(work)
        return list(self.heard)

    def outcome(self, work: Callable[[], None], largest: int) -> type[Exception] | None:
        self.largest_of_all.append(largest)
        try:
            self.raise_on_all_ranks(work)
        except (BadInput, Interrupted) as error:
            return type(error)
        return None
