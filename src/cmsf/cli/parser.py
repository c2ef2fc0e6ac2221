"""What every command has in common: a parser that explains itself, and flags for the machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from cmsf.utils.errors import BadInput
from cmsf.utils.files import expand_user
from cmsf.utils.numbers import check_integer, parse_number
from cmsf.utils.text import escape_unprintable, one_line

SOURCE_HELP = "a folder of images, a .csv or .parquet list, an .npz, torchvision:NAME, hf:NAME or wds:SHARDS"


_MOST = 1024


class Parser(argparse.ArgumentParser):
    """Mistakes are BadInput like any other, with the nearest name where there is one."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")

    def options(self) -> list[str]:
        return list(self._option_string_actions)


def add_machine_flags(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
    parser.add_argument("--threads", metavar="N", help="CPU threads (default: OMP_NUM_THREADS, or all cores)")
    parser.add_argument(
        "--workers",
        metavar="N",
        help="processes that decode images which are not held in memory (default: one a core; 0: none)",
    )


def set_threads(text: str | None) -> None:
    import torch

    from cmsf.data import available_cores
    from cmsf.utils.distributed import World

    available = available_cores()
    asked = parse_int("--threads", text, 1, _MOST, f"here at best {available}")
    if asked is not None or "OMP_NUM_THREADS" not in os.environ:  # which torch heeds by itself
        torch.set_num_threads(asked or max(1, available // World.from_env().local_size))


def parse_workers(text: str | None) -> int | None:
    return parse_int("--workers", text, 0, _MOST, "0 decodes in the process that trains")


def parse_int(flag: str, text: str | None, least: int, most: int, hint: str) -> int | None:
    return None if text is None else check_integer(flag, parse_number(text), least, most, hint)


def parse_out(path: str | Path, *suffixes: str) -> Path:
    """Returns the file to write, or BadInput before anything is computed for it."""
    out = expand_user(path)
    if out.suffix.lower() not in suffixes:
        raise BadInput(f"invalid value --out {out}; expected a {' or '.join(suffixes)} file")
    if os.path.isdir(out) or not os.path.isdir(out.absolute().parent):  # which take a path of any length
        raise BadInput(f"invalid value --out {out}; expected a file in an existing folder")
    return out


def print_paths(paths: dict[str, Any]) -> None:
    width = max(map(len, paths))
    for name, path in paths.items():
        print(f"{name:{width}}  {escape_unprintable(str(path))}")  # whole, however long: one wants to copy it


def print_line(line: str) -> None:
    """A line of what a command has to say; names in it come from files."""
    print(one_line(line))
