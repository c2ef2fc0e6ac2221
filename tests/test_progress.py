"""Bars: they say what is done, go when it is, and never write over one another."""

import contextlib
import io
import os
import pty
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal import Terminal

from cmsf.utils import progress
from cmsf.utils.distributed import World
from cmsf.utils.files import file_sha256
from cmsf.utils.progress import (
    REFRESH_PER_SECOND,
    RIGHT_MARGIN,
    bars_enabled,
    progress_bar,
    progress_prefix,
    redirect_progress,
    track,
)
from cmsf.utils.screen import Screen, TrainingPanel
from cmsf.utils.text import format_duration, format_time_left

A_FRAME = 1.5 / REFRESH_PER_SECOND


class Looked:
    """A terminal in the place of sys.stderr, to be looked at in between."""

    def __init__(self, ours: int, columns: int) -> None:
        self._ours, self.terminal = ours, Terminal(columns)

    def __call__(self) -> list[str]:
        """The lines on it, once what is new was drawn."""
        time.sleep(A_FRAME)
        self.terminal.show(os.read(self._ours, 1 << 16).decode())
        return [line for line in self.terminal.text.splitlines() if line]


@pytest.fixture
def looking_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Looked]]:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w", encoding="utf-8") as file:

        def look(columns: int) -> Looked:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setattr(sys, "stderr", file)
            return Looked(ours, columns)

        yield look
    os.close(ours)


@pytest.mark.parametrize("columns", [30, 40, 60, 80])
def test_a_bar_is_one_line_that_goes_when_all_is_done(columns: int, looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(columns)
    for item in track("abc", "reading", 3):
        if item == "c":
            (line,) = look()
            assert line.startswith("reading")
            assert " 2 of 3" in line
            assert len(line) <= columns - RIGHT_MARGIN
    assert look() == []
    assert not look.terminal.cursor_hidden


@pytest.mark.parametrize("columns", [60, 80])
def test_count_and_time_stay_whole_beside_a_long_description(columns: int, looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(columns)
    with progress_bar("round 2 of 2: fine-tuning on 12345 labels", 1_234_567) as update:
        update(1234, "of cars, which has a long name too")
        (line,) = look()
        assert line.startswith("round 2")
        assert "1234 of 1234567" in line
        assert ":" in line.split("1234567")[1]
        assert len(line) <= columns - RIGHT_MARGIN


def test_what_is_said_meanwhile_stays_above_the_bar(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(60)
    screen = Screen()
    with progress_bar("reading", 3):
        print("a message", file=sys.stderr)
        screen.print("another")
        *messages, line = look()
    assert messages == ["a message", "another"]
    assert line.startswith("reading")
    assert look() == ["a message", "another"]


def test_a_bar_within_a_bar_is_a_word_beside_it(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(80)
    with progress_bar("transfer", 10) as at:
        at(4, "cars")
        assert look()[0].endswith(" cars")
        for item in track("ab", "features", 2):
            if item == "b":
                (line,) = look()
                assert "4 of 10" in line
                assert line.endswith("features 2 of 2")
        assert look()[0].endswith(" cars")


def test_names_are_text_and_no_markup(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(80)
    with progress_prefix("[/red]\x1b[2J"), progress_bar("features", 2):
        assert look()[0].startswith("[/red]\\x1b[2J: features")


def test_an_error_within_a_bar_leaves_nothing_of_it(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(80)

    def interrupted() -> None:
        for _ in track("ab", "reading", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert look() == []
    assert bars_enabled()


def test_who_has_the_terminal_is_told_instead() -> None:
    told: list[str] = []
    with redirect_progress(told.append), progress_prefix("judging"):
        assert "".join(track("ab", "features", 2)) == "ab"
        assert list(track("x", "folders", None)) == ["x"]
    expected = ["features 1 of 2", "features 2 of 2", "features 2 of 2", "", "folders 0", "folders 1", ""]
    assert told == [f"judging: {one}" if one else "" for one in expected]


def test_nothing_is_drawn_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not bars_enabled()
    assert list(track("ab", "reading", 2)) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_a_forked_process_writes_to_the_terminal_itself(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(80)
    with progress_bar("reading", 2):
        child = os.fork()
        if not child:
            os._exit(hasattr(sys.stderr, "rich_proxied_file"))
        assert os.waitpid(child, 0)[1] == 0
        assert hasattr(sys.stderr, "rich_proxied_file")
        look()


def test_the_time_left_follows_the_pace_so_far() -> None:
    now = 100.0
    panel = TrainingPanel("name", epochs=4, total=40, done=10, now=lambda: now)
    assert panel.remaining is None
    panel.advance(11)
    now = 120.0
    panel.advance(21)
    assert (panel.elapsed, panel.remaining) == (20, 38)
    now = 122.0
    panel.advance(22)
    assert (panel.elapsed, panel.remaining) == (22, 36)
    panel.stop()
    now = 200.0
    assert (panel.elapsed, panel.remaining) == (22, None)


def test_work_that_was_done_before_says_nothing_of_the_pace(looking_at: Callable[[int], Looked]) -> None:
    look = looking_at(80)
    with progress_bar("trials", 100) as at:
        at(1)
        at(90, resumed=True)
        assert "90 of 100 -:--:--" in " ".join(look()[0].split())


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of lines without a terminal, which are looked for a thousand times a second."""
    clock = Clock()
    monkeypatch.setattr(progress, "_silence", progress._Silence(clock))
    monkeypatch.setattr(progress, "_POLL_SECONDS", 0.001)
    return clock


@pytest.fixture
def heard(clock: Clock, capfd: pytest.CaptureFixture[str]) -> Callable[[float], list[str]]:
    """Lets seconds pass, and returns what is said then."""

    def wait(seconds: float) -> list[str]:
        clock.now += seconds
        time.sleep(0.05)
        out, err = capfd.readouterr()
        assert out == ""  # which belongs to results
        return err.splitlines()

    return wait


Heard = Callable[[float], list[str]]


def test_without_a_terminal_a_line_comes_after_ten_seconds_and_then_one_a_minute(heard: Heard) -> None:
    with progress_bar("features", 50_000) as update:
        assert heard(9) == []
        update(2560)
        assert heard(0.9) == []
        assert heard(0.1) == ["features 2,560 of 50,000, 3 min left"]
        assert heard(59.9) == []
        update(40_000, "of cars")
        assert heard(0.1) == ["features 40,000 of 50,000, of cars, 17 s left"]
        assert heard(60) == ["features 40,000 of 50,000, of cars"]  # what was expected is over
    assert heard(600) == []


def test_what_has_no_total_or_takes_long_for_the_first_is_said_too(heard: Heard) -> None:
    with progress_bar("opening cars", None):
        assert heard(10) == ["opening cars"]
    with progress_bar("looking into folders", None) as update:
        update(1200)
        assert heard(60) == ["looking into folders 1,200"]
    with progress_bar("fits", 3):
        assert heard(60) == ["fits 0 of 3"]


def test_a_bar_within_a_bar_is_a_word_in_its_line(heard: Heard) -> None:
    with progress_bar("transfer", 10) as at:
        heard(8)
        at(4, "cars")
        for item in track("ab", "features", 2):
            if item == "b":
                assert heard(2) == ["transfer 4 of 10, features 2 of 2, 10 s left"]
        assert heard(60) == ["transfer 4 of 10, cars"]


def test_short_bars_in_a_row_are_no_excuse_for_silence(heard: Heard) -> None:
    lines = []
    for number in range(20):
        with progress_bar(f"bar {number}", 2):
            lines += heard(4)
    assert [line.split(" 0 of")[0] for line in lines] == ["bar 2", "bar 17"]  # after 12 and 72 seconds
    heard(3600)  # of something else
    with progress_bar("later", 2):
        assert heard(9) == []


def test_a_message_takes_the_place_of_a_line(heard: Heard) -> None:
    screen = Screen()
    with progress_bar("features", 2):
        heard(9)
        screen.print("half of it")
        assert heard(9) == ["half of it"]
        assert heard(1) == ["features 0 of 2"]


def test_long_epochs_are_counted_without_a_terminal(heard: Heard) -> None:
    screen = Screen()
    with screen.training_panel("name", epochs=20, total=50_000, done=1000, history=list):
        heard(5)
        screen.advance(1234)
        assert heard(5) == ["step 1,234 of 50,000, epoch 1 of 20, 17 min left"]
        screen.step(2500, {"loss": 1.0})
        with progress_prefix("validation"):
            for batch in track("ab", "features", 512, each=256):
                if batch == "b":
                    (line,) = heard(60)
        assert line.startswith("step 2,500 of 50,000, validation: features 257 of 512, ")
    screen.advance(3000)
    assert heard(600) == []


def test_who_is_quiet_or_a_fork_or_another_rank_says_nothing(heard: Heard, clock: Clock) -> None:
    quiet = Screen(quiet=not World(rank=1, size=2).is_main)
    with quiet.bars(), quiet.training_panel("name", 20, 100, 0, list), progress_bar("features", 2) as update:
        update(1)
        quiet.advance(1)
        assert heard(600) == []
    with progress_bar("reading", 2):
        child = os.fork()
        if not child:
            clock.now += 600
            with progress_bar("of a worker", 2):
                time.sleep(0.05)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert heard(0) == []


def test_a_line_goes_to_stderr_as_it_was_when_the_bar_began(heard: Heard) -> None:
    with progress_bar("opening", None), contextlib.redirect_stderr(io.StringIO()) as theirs:
        assert heard(10) == ["opening"]
    assert theirs.getvalue() == ""


def test_time_left_is_said_in_words() -> None:
    times = (0.2, 59.4, 59.6, 119, 3540, 7530)
    expected = ["1 s left", "59 s left", "1 min left", "2 min left", "59 min left", "2 h 6 min left"]
    assert [format_time_left(seconds) for seconds in times] == expected


def test_a_duration_is_written_as_a_clock_shows_it() -> None:
    assert [format_duration(seconds) for seconds in (7.9, 67, 3600 * 26 + 187)] == ["0:07", "1:07", "26:03:07"]


def test_a_hash_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    for size in (1, 2, 3, 4):
        monkeypatch.setattr("cmsf.utils.files._CHUNK", size)
        assert file_sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
