"""One case: run it, watch it, and say what of this does not hold.

It ends well, or in one short line that anybody can read, with exit code 2. It does not hang, take memory without
end, write outside of the folder it was given, start a process, ask the network, or run code from a file.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import category

from cmsf.cli import reported
from hostile import canary

LONGEST = 300
_PREFIX = "cmsf: "
_FORBIDDEN = {
    "subprocess.Popen": "started a process",
    "os.system": "started a process",
    "os.exec": "started a process",
    "os.posix_spawn": "started a process",
    "os.fork": "started a process",
    "os.forkpty": "started a process",
    "socket.connect": "asked the network",
    "socket.getaddrinfo": "asked the network",
    "socket.sendto": "asked the network",
}
_OF_NAMES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")
"""They change a name, though it be that of a link."""
_OF_FILES = ("os.truncate", "os.chmod")
"""They change what a link leads to."""
_HARMLESS = (Path("/dev/null"), Path("/proc"), Path("/sys"))


@dataclass
class Box:
    """A folder for one case: hostile files in `given`, `out` to write to, and beside them what nobody may touch."""

    path: Path

    @property
    def given(self) -> Path:
        return self.path / "given"

    @property
    def out(self) -> Path:
        return self.path / "out"

    def put(self, name: str, content: bytes | str) -> Path:
        file = self.given / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return file


@dataclass
class Case:
    """What to do with the hostile files of a box, and where that may write."""

    action: Callable[[], int]
    may_write: list[Path] = field(default_factory=list)


@dataclass
class Verdict:
    exit_code: int
    complaints: list[str]
    output: str


@dataclass
class _Watch:
    """What the audit hook of this process has seen since the case began."""

    allowed: list[Path] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    active: bool = False


_watch = _Watch()


def watch_this_process() -> None:
    """Audit hooks stay for good: this is for a process of its own."""
    sys.addaudithook(_hook)


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if not _watch.active:
        return
    if event in _FORBIDDEN and given[0] != "git":  # which says what commit this is
        _watch.seen.append(f"{_FORBIDDEN[event]} ({event} {str(given)[:120]})")
        raise PermissionError(f"{event} is not for hostile files")
    if event == "open":
        path, _, flags = given
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            _note_write(path, through_links=not flags & os.O_NOFOLLOW)
    elif event in _OF_NAMES:
        if event != "os.symlink":  # of which the first is but what it says
            _note_write(given[0], through_links=False)
        if event in ("os.rename", "os.link", "os.symlink"):
            _note_write(given[1], through_links=False)
    elif event in _OF_FILES:
        _note_write(given[0], through_links=True)


def _note_write(path: Any, through_links: bool) -> None:
    """through_links: whether what is written is what a link leads to, and not the link; folders always are."""
    if isinstance(path, int):
        return
    name = os.path.abspath(os.fsdecode(path))
    above, last = os.path.split(name)
    place = Path(os.path.realpath(name) if through_links else os.path.join(os.path.realpath(above), last))
    if not any(place.is_relative_to(one) for one in (*_HARMLESS, *_watch.allowed)):
        _watch.seen.append(f"wrote outside ({place})")


def judge(box: Box, case: Case) -> Verdict:
    """Run a case in this process, whose standard output and error are files meanwhile."""
    before = _everything_below(box.path, case.may_write)
    allowed = [place.resolve() for place in (box.out, box.path / "cache", *case.may_write)]
    complaints: list[str] = []
    code = -1
    with _captured(box.path.parent) as captured:
        _watch.allowed, _watch.seen, _watch.active = allowed, [], True
        try:
            code = reported(case.action)
        except SystemExit as done:  # --help
            code = int(done.code or 0)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            complaints.append(f"raised {type(error).__name__} at {where}: {str(error)[:160]!r}")
        finally:
            _watch.active = False
    output = captured()
    complaints += _watch.seen
    complaints += [] if code in (-1, 0, 2) else [f"exit code {code}"]
    complaints += _about_output(output, code)
    if canary.sings(box.path):
        complaints.append("ran code from a file")
    after = _everything_below(box.path, case.may_write)
    changed = sorted(str(place) for place in before.keys() | after.keys() if before.get(place) != after.get(place))
    complaints += [f"changed {changed[0]}"] if changed else []
    return Verdict(code, complaints, output)


def _about_output(output: str, code: int) -> list[str]:
    found = []
    steering = [letter for letter in output if letter != "\n" and category(letter) in ("Cc", "Cs", "Zl", "Zp")]
    steering += [
        letter for letter in output if letter in "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f"
    ]
    if steering:
        found.append(f"printed {steering[0]!r}")
    if "Traceback (most recent call last)" in output or "Warning: " in output:
        found.append(f"printed a traceback or a warning: {output[-200:]!r}")
    errors = [line for line in output.splitlines() if line.startswith(_PREFIX)]
    if code == 2 and len(errors) != 1:
        found.append(f"{len(errors)} lines for exit code 2: {output[-300:]!r}")
    if any(len(line) > LONGEST + len(_PREFIX) for line in output.splitlines()):
        found.append(f"a line of {max(map(len, output.splitlines()))} characters")
    return found


def _everything_below(path: Path, left_out: list[Path]) -> dict[str, tuple[int, int]]:
    """Files and folders with size and date, but for where a case may write."""
    aside = {str(path / "out"), str(path / "cache"), *map(str, left_out)}
    found = {}
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = [name for name in subfolders if os.path.join(folder, name) not in aside]
        for name in (*subfolders, *files):
            state = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (state.st_size if name in files else 0, state.st_mtime_ns)
    return found


@contextmanager
def _captured(place: Path) -> Iterator[Callable[[], str]]:
    """Both streams by their descriptors, for libraries in C print, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept, text = [os.dup(1), os.dup(2)], [""]
    file = place / f"printed-{os.getpid()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    streams = sys.stdout, sys.stderr
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    try:
        yield lambda: text[0]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        for number, old in enumerate(kept, start=1):
            os.dup2(old, number)
            os.close(old)
        text[0] = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "surrogateescape")
        os.close(descriptor)
        file.unlink()
