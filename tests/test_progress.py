"""Bars: they say what is done, go when it is, and never write over one another."""

import os
import pty
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminal import Terminal

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
from cmsf.utils.text import format_duration

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


def test_a_duration_is_written_as_a_clock_shows_it() -> None:
    assert [format_duration(seconds) for seconds in (7.9, 67, 3600 * 26 + 187)] == ["0:07", "1:07", "26:03:07"]


def test_a_hash_is_that_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    for size in (1, 2, 3, 4):
        monkeypatch.setattr("cmsf.utils.files._CHUNK", size)
        assert file_sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
