"""The command line. torch is imported only by the commands that compute, so that help and mistakes answer at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence

from cmsf import __version__
from cmsf.cli import data, embed, evaluate, finetune, flops, labels, predict, recipes, report, suspects, train
from cmsf.cli.parser import Parser
from cmsf.utils.errors import BadInput, FailedElsewhere, did_you_mean
from cmsf.utils.text import one_line

_COMMANDS = {
    "train": train,
    "evaluate": evaluate,
    "finetune": finetune,
    "predict": predict,
    "embed": embed,
    "report": report,
    "data": data,
    "labels": labels,
    "suspects": suspects,
    "recipes": recipes,
    "flops": flops,
}

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
SPIN_COUNT = "5000"
"""Between 1,000, which costs speed on an idle machine, and 10,000, which costs it on a busy one (decision 32)."""

_KNOWN_WARNINGS = (("", r"PIL\."), ("Detected pickle protocol", ""))
"""What libraries say of a damaged file, in lines of their own, before it is refused in ours."""


def main(arguments: Sequence[str] | None = None) -> int:
    spin_briefly()
    return reported(lambda: run_command(list(sys.argv[1:] if arguments is None else arguments)))


def spin_briefly() -> None:
    """Lets OpenMP threads sleep soon while they wait, unless the user has chosen otherwise.

    A thread that spins keeps a core from the one it waits for, as soon as anything else runs on the machine; one that
    sleeps at once is woken too late. OpenMP reads this once, when torch is loaded. Worker processes inherit it.
    Importing the library sets nothing.
    """
    if "torch" not in sys.modules and not _WAITING & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def reported(command: Callable[[], int]) -> int:
    """Returns the exit code of a command; an error that a user can correct is printed in one line."""
    try:
        with warnings.catch_warnings():
            for message, module in _KNOWN_WARNINGS:
                warnings.filterwarnings("ignore", message, module=module)
            return command()
    except BadInput as error:
        if not isinstance(error, FailedElsewhere):
            print(f"cmsf: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cmsf: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def add_commands(parser: Parser) -> dict[str, Parser]:
    """Adds a parser for each command. A command is a module: its docstring describes it, and `execute` runs it."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    parsers: dict[str, Parser] = {}
    for name, module in _COMMANDS.items():
        usage = getattr(module, "USAGE", None)
        parsers[name] = commands.add_parser(name, usage=usage, help=module.HELP, description=module.__doc__)
        module.add_arguments(parsers[name])
        parsers[name].set_defaults(command=module.execute)
    return parsers


def run_command(arguments: list[str]) -> int:
    parser = Parser(prog="cmsf", description="Representation learning by constrained mean shift.")
    parser.add_argument("--version", action="version", version=f"cmsf {__version__}")
    subparsers = add_commands(parser)
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in subparsers:
        hint = did_you_mean(arguments[0], subparsers, f"use one of {', '.join(subparsers)}")
        raise BadInput(f"unknown command {arguments[0]!r}; {hint}")
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = subparsers.get(arguments[0], parser)
        flag = unknown[0].split("=")[0]
        raise BadInput(f"{known.prog} has no {flag}; {did_you_mean(flag, known.options(), f'see {known.prog} --help')}")
    command: Callable[[argparse.Namespace], int] = chosen.command
    return command(chosen)
