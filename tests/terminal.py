"""A terminal as far as cmsf uses one: what a person would see of a process that runs in it."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

PATIENCE = 120
_PIECES = re.compile(r"\x1b\[(?P<code>[0-?]*)(?P<what>[@-~])|(?P<control>[\r\n\x07])|(?P<letter>[^\x1b])")


class Terminal:
    """Lines of letters; what scrolls off the top stays in `lines`. Anything it does not know is an error."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]
        self.row = self.column = 0
        self.cursor_hidden = False
        self._rest = ""

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def show(self, written: str) -> None:
        written = self._rest + written
        place = 0
        while piece := _PIECES.match(written, place):
            place = piece.end()
            if piece["letter"]:
                self._write(piece["letter"])
            elif piece["control"] == "\r":
                self.column = 0
            elif piece["control"] == "\n":
                self._go_down()
            elif piece["what"]:
                self._obey(piece["code"], piece["what"])
        self._rest = written[place:]
        assert len(self._rest) < 20, self._rest

    def _write(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._go_down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _go_down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _obey(self, code: str, what: str) -> None:
        count = int(code) if code.isdecimal() else 1
        if what == "A":
            self.row = max(self.row - count, len(self.lines) - self.rows, 0)
        elif what == "K" and code == "2":
            self.lines[self.row] = ""
        elif code == "?25":
            self.cursor_hidden = what == "l"
        else:
            assert what == "m", (code, what)  # colours


class InTerminal:
    """A process in a terminal of its own, from its start to its end."""

    def __init__(self, command: Sequence[str], columns: int = 80, rows: int = 24) -> None:
        self.terminal, self.written = Terminal(columns, rows), ""
        self._letters = codecs.getincrementaldecoder("utf-8")()
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=environment | {"TERM": "xterm-256color"},
        )
        os.close(theirs)

    def resize(self, columns: int, rows: int) -> None:
        """What was written before is seen as it was meant."""
        while self._take(patience=0):
            pass
        self.terminal.columns, self.terminal.rows = columns, rows
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def watch(self, until: Callable[[str], bool] = lambda text: False) -> None:
        """Until the screen is so, or the process has ended."""
        deadline = time.monotonic() + PATIENCE
        while not until(self.terminal.text):
            assert time.monotonic() < deadline, self.terminal.text
            if self._take(patience=1) is None:
                self.process.wait(PATIENCE)
                return

    def _take(self, patience: float) -> str | None:
        """What comes in so many seconds; None where nobody is left who could write."""
        if not select.select([self._ours], [], [], patience)[0]:
            return ""
        try:
            letters = self._letters.decode(os.read(self._ours, 1 << 16))
        except OSError:
            return None
        self.written += letters
        self.terminal.show(letters)
        return letters or None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
