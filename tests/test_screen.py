"""What a person sees of `cmsf train`: in a terminal, without one, and with --quiet."""

import os
import pty
import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers import write_npz, write_photos
from rich.console import Console
from runs import TINY, metrics
from terminal import InTerminal, Terminal

import cmsf
from cmsf.cli import main
from cmsf.runs.log import MetricsLog, readable_epoch_lines
from cmsf.utils.progress import RIGHT_MARGIN
from cmsf.utils.screen import Screen, TrainingPanel, sparkline

EPOCHS = 5
SETTINGS = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | {"evaluate_every": 1}).items()]
LONG = "a message " + 6 * "that is longer than a line "
HELD = 12
SAYING = f"""
import signal, sys, time
from cmsf.cli import main
from cmsf.utils.screen import Screen

def step_and_say(self, number, line, step=Screen.step):
    step(self, number, line)
    if number == 4:
        self.print({LONG!r})
        print("a stray line", file=sys.stderr)
        time.sleep(1.5)
    if number == {HELD}:
        signal.pause()

Screen.step = step_and_say
sys.exit(main())
"""
"""A command that trains, and waits for a while at a step and for a signal at another, so that both are seen."""


def frame(text: str) -> dict[str, str]:
    """The rows of the panel at the end of a screen, by name; nothing where it is not all there."""
    lines = text.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("╭")]
    if not starts or not lines[-1].startswith("╰"):
        return {}
    inside = [line[2:-2].rstrip() for line in lines[starts[-1] + 2 : -1]]
    width = max(
        (len(match[0]) for line in inside if (match := re.match(r"[a-z0-9]\S*( rank|-nn)? +(?=\S)", line))), default=0
    )
    rows: dict[str, str] = {}
    for line in inside:
        name = line[:width].strip() or next(reversed(rows))
        rows[name] = f"{rows.get(name, '')} {line[width:].strip()}".strip()
    return rows


def assert_as_logged(rows: dict[str, str], lines: list[dict[str, Any]]) -> None:
    """What it shows is of the newest line, or of the one before where it was drawn just before that was told."""
    step = int(re.match(r"[\d,]+", rows["step"])[0].replace(",", ""))
    assert rows["step"].endswith(f", epoch {(step - 1) // 4 + 1} of {EPOCHS}")
    newest = [line for line in lines if line["kind"] == "step" and line["step"] <= step][-2:]
    assert {name: rows[name] for name in MEASURES} in [written(line) for line in newest]


MEASURES = ("speed", "loss", "purity", "median rank", "embeddings")


def written(line: dict[str, Any]) -> dict[str, str]:
    terms = [f"{name} {line[f'loss_{name}']:.4f}" for name in ("unconstrained", "constrained")]
    said = (
        f"{line['images_per_second']:,.1f} images/s",
        ", ".join([f"{line['loss']:.4f}", *terms]),
        f"{line['purity_unconstrained']:.3f} in M, {line['purity_constrained']:.3f} in C",
        f"{line['rank_median']:,g}",
        f"spread {line['spread']:.3f}, effective rank {line['effective_rank']:.1f}",
    )
    return dict(zip(MEASURES, said, strict=True))


def assert_as_judged(said: str, name: str, lines: list[dict[str, Any]]) -> None:
    """The last value, the difference to the one before it, and the way there."""
    values = [line[name] for line in lines if line["kind"] == "epoch"]
    change = round(values[-1] - values[-2], 2)
    arrow = "↑" if change > 0 else "↓" if change < 0 else "→"
    assert said.split() == [f"{values[-1]:.2f}", "%", arrow, f"{change:+.2f}", sparkline(values[-16:])]


class Stopped:
    """A run in 80 columns, then in 60, until somebody presses Ctrl-C; and every whole frame of it."""

    def __init__(self, out: Path, data: Path) -> None:
        self.out, self.frames = out, []
        command = [sys.executable, "-c", SAYING, "train", "cmsf-self-small", "--data", str(data), "--out", str(out)]
        with InTerminal([*command, *SETTINGS, f"--epochs={EPOCHS}", "--threads=1"]) as self.seen:
            self.seen.watch(lambda text: self._keep(text) and self.frames[-1]["step"].startswith(f"{HELD} "))
            self.seen.resize(60, 24)
            self.seen.watch(lambda text: self._keep(text) and len(text.splitlines()[-1]) == 60 - RIGHT_MARGIN)
            self.seen.press("\x03")
            self.seen.watch()
        self.text, self.lines = self.seen.terminal.text, metrics(cmsf.Run(out))

    def _keep(self, text: str) -> bool:
        rows = frame(text)
        self.frames += [rows] if "loss" in rows else []
        return bool(self.frames)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("screen")
    return Stopped(folder / "run", write_npz(folder / "bars.npz"))


def test_each_frame_says_what_the_log_says_of_its_step(stopped: Stopped) -> None:
    assert len({rows["step"] for rows in stopped.frames}) > 1
    for rows in stopped.frames:
        assert_as_logged(rows, stopped.lines)


def test_messages_come_above_the_panel_and_stay(stopped: Stopped) -> None:
    for message in (LONG, "a stray line", "4 classes; test: 16 of 160 labelled images"):
        assert "".join(stopped.text.split()).count("".join(message.split())) == 1
    assert stopped.text.index("a stray line") < stopped.text.index("╭")


def test_a_window_that_is_made_narrower_has_one_panel_that_fits(stopped: Stopped) -> None:
    assert stopped.text.count("╭") == stopped.text.count("╰") == 1
    assert {len(line) for line in stopped.text.splitlines() if line.startswith(("╭", "│", "╰"))} == {60 - RIGHT_MARGIN}


def test_ctrl_c_leaves_the_last_frame_the_message_and_the_cursor(stopped: Stopped) -> None:
    assert stopped.seen.process.returncode == 130
    assert not stopped.seen.terminal.cursor_hidden
    *above, message = stopped.text.rstrip().splitlines()
    assert message.endswith("resumes from there")
    assert any(line.startswith("╰") for line in above[-2:])
    assert "Traceback" not in stopped.text


def test_a_resumed_run_shows_the_judgements_it_had_in_forty_columns_too(stopped: Stopped) -> None:
    with InTerminal([sys.executable, "-m", "cmsf", "train", "--resume", str(stopped.out)], 40, 30) as seen:
        seen.watch()
    assert seen.process.returncode == 0
    assert not seen.terminal.cursor_hidden
    assert all(len(line) <= 40 for line in seen.terminal.lines)
    first = Terminal(40, 30)
    first.show(seen.written[: seen.written.index("╯") + 1])
    assert frame(first.text)["step"].startswith(f"{HELD} of {4 * EPOCHS}, epoch 3")
    for name in ("1-nn", "20-nn"):
        assert_as_judged(frame(first.text)[name], name, stopped.lines)
    lines, panel = metrics(cmsf.Run(stopped.out)), seen.terminal.text.split("╰")[0] + "╰"
    assert_as_logged(frame(panel), lines)
    assert frame(panel)["step"].startswith(f"{lines[-1]['step']} of {lines[-1]['step']},")
    for name in ("1-nn", "20-nn"):
        assert_as_judged(frame(panel)[name], name, lines)


@pytest.mark.usefixtures("one_thread")
def test_without_a_terminal_there_is_a_plain_line_an_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some test services set it: colours may be, but nobody looks
    data = write_npz(tmp_path / "bars.npz")
    assert (
        main(
            [
                "train",
                "cmsf-self-small",
                "--data",
                str(data),
                "--out",
                str(tmp_path / "run"),
                *SETTINGS,
                "--epochs=2",
            ]
        )
        == 0
    )
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert "\r" not in said
    assert [line[:12] for line in said.splitlines() if line.startswith("epoch")] == ["epoch   1   ", "epoch   2   "]


def test_quiet_training_says_nothing_on_a_terminal(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=20, classes=2, side=24)
    command = [sys.executable, "-m", "cmsf", "train", "cmsf-self-small", "--data", str(photos), "--quiet"]
    with InTerminal([*command, "--out", str(tmp_path / "run"), *SETTINGS, "--epochs=1"]) as seen:
        seen.watch()
    assert seen.process.returncode == 0
    assert seen.written == ""


@pytest.fixture
def on_a_terminal() -> Iterator[Console]:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as file:
        yield Console(file=file, width=80, height=24, force_interactive=True, force_terminal=True)
    os.close(ours)


@pytest.mark.usefixtures("one_thread")
def test_the_panel_is_told_how_far_judging_is(
    on_a_terminal: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(TrainingPanel, "set_status", lambda panel, doing: told.append(doing))
    cmsf.train(
        "cmsf-self-small",
        write_npz(tmp_path / "bars.npz"),
        tmp_path / "run",
        screen=Screen(on_a_terminal),
        **TINY | {"epochs": 1},
    )
    assert "validation: features 144 of 144" in told
    assert "validation: neighbours 16 of 16" in told
    assert told[-1] == ""


def test_what_a_log_says_is_not_believed_to_be_numbers() -> None:
    panel = TrainingPanel("name", 2, 10)
    for line in ({"1-nn": "∞"}, {"1-nn": None}, {"1-nn": float("nan")}, {"1-nn": True}, {"20-nn": 50}):
        panel.add_accuracies(line)
    console = Console(width=60, record=True, file=StringIO())
    console.print(panel)
    said = console.export_text()
    assert "1-nn" not in said
    assert "50.00 %" in said


def test_a_panel_counts_steps_that_the_log_has_no_line_of() -> None:
    panel = TrainingPanel("name", 3, 12)
    shown = []
    for step in (1, 4, 5, 12):
        panel.advance(step)
        console = Console(width=60, record=True, file=StringIO())
        console.print(panel)
        shown.append(frame(console.export_text())["step"])
    assert shown == [f"{step} of 12, epoch {epoch} of 3" for step, epoch in ((1, 1), (4, 1), (5, 2), (12, 3))]


def test_a_curve_reaches_from_the_least_to_the_greatest() -> None:
    assert sparkline([1, 2, 8]) == "▁▂█"
    assert sparkline([3, 3]) == "▁▁"


def test_a_log_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    good = [b'{"kind": "epoch", "step": %d, "1-nn": %d}\n' % (step, 10 * step) for step in (1, 2)]
    for bad in (
        b'{"kind": "epoch", \xff}\n',
        b'{"kind": "epoch", "x": ' + b"[" * 100_000 + b"\n",
        b'{"kind": "epoch", "st',
    ):
        content = b"".join([good[0], b'{"kind": "step", "step": 2}\n', good[1], bad])
        (tmp_path / "log").write_bytes(content)
        with MetricsLog(tmp_path / "log", tmp_path / "events", len(content), 3, print):
            assert [line["1-nn"] for line in readable_epoch_lines(tmp_path / "log")] == [10, 20]
