"""What every command has in common: a parser that explains itself, and flags for the machine."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from cmsf.utils.errors import BadInput
from cmsf.utils.numbers import check_integer, parse_number
from cmsf.utils.text import escape_unprintable, one_line

SOURCE_HELP = "a folder of images, a .csv or .parquet list, an .npz, torchvision:NAME, hf:NAME or wds:SHARDS"
_MOST = 1024


class Parser(argparse.ArgumentParser):
    """Mistakes are BadInput like any other, with the nearest name where there is one."""

    def __init__(self, **keywords: Any) -> None:
        self._group_of: dict[str, Any] = {}
        self._further: Any = None
        self.further_help: dict[argparse.Action, str] = {}
        """The flags that --help leaves out, with their help."""
        super().__init__(allow_abbrev=False, **keywords)

    def group_flags(self, common: Mapping[str, Sequence[str]], further: str) -> None:
        """Puts the flags that are added from now on into groups: --help shows those of `common`, which has the names
        of flags by title, and --help-all also the others, under the title `further`."""
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all the other flags too")
        for title, names in common.items():
            self._group_of |= dict.fromkeys((f"--{name}" for name in names), self.add_argument_group(title))
        self._further = self.add_argument_group(further)

    def add_argument(self, *names: str, **keywords: Any) -> argparse.Action:
        if names[0] in self._group_of:
            return cast(argparse.Action, self._group_of[names[0]].add_argument(*names, **keywords))
        if self._further is None:
            return super().add_argument(*names, **keywords)
        text = keywords.pop("help")
        action: argparse.Action = self._further.add_argument(*names, help=argparse.SUPPRESS, **keywords)
        self.further_help[action] = text
        return action

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")

    def options(self) -> list[str]:
        return list(self._option_string_actions)

    def add_options(self, help_texts: Mapping[str, str]) -> None:
        """Adds options by what their help shows: "--flag VALUE", or "--flag" for one that is on or off."""
        for option, text in help_texts.items():
            flag, _, metavar = option.partition(" ")
            if metavar:
                self.add_argument(flag, metavar=metavar, help=text)
            else:
                self.add_argument(flag, action="store_true", help=text)

    def add_machine_flags(self) -> None:
        """Adds --device, --threads and --workers, for `apply_machine_flags`."""
        workers = "processes that decode images which are not held in memory (default: one a core; 0: none)"
        self.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
        self.add_argument("--threads", metavar="N", help="CPU threads (default: OMP_NUM_THREADS, or all cores)")
        self.add_argument("--workers", metavar="N", help=workers)


class _HelpAll(argparse.Action):
    """Shows every flag, those too that --help leaves out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        for action, text in parser.further_help.items():
            action.help = text
        parser.print_help()
        parser.exit()


def apply_machine_flags(chosen: argparse.Namespace) -> tuple[str, int | None]:
    """Sets the number of CPU threads; returns the device and the number of workers."""
    import torch

    from cmsf.data import available_cores
    from cmsf.utils.distributed import World

    available = available_cores()
    threads = parse_int("--threads", chosen.threads, 1, _MOST, f"here at best {available}")
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:  # which torch heeds by itself
        torch.set_num_threads(threads or max(1, available // World.from_env().local_size))
    return chosen.device, parse_int("--workers", chosen.workers, 0, _MOST, "0 decodes in the process that trains")


def parse_int(flag: str, text: str | None, minimum: int, maximum: int, hint: str) -> int | None:
    return None if text is None else check_integer(flag, parse_number(text), minimum, maximum, hint)


def largest_classes(counts: Mapping[str, int], shown: int = 10) -> list[str]:
    """Returns a line for each of the largest classes, and one for how many more there are."""
    lines = [f"  {count:7,}  {name}" for name, count in Counter(counts).most_common(shown)]
    return [*lines, f"           … and {len(counts) - shown} classes more"] if len(counts) > shown else lines


def print_paths(paths: dict[str, Any]) -> None:
    width = max(map(len, paths))
    for name, path in paths.items():
        print(f"{name:{width}}  {escape_unprintable(str(path))}")  # whole, however long: one wants to copy it


def print_line(line: str) -> None:
    """Prints a line to stdout, escaped and shortened: names in it come from files."""
    print(one_line(line))
