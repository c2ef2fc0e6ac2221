"""Weights without a run: --init and --backbone, of which a run is made, untrained, where a command needs one."""

from __future__ import annotations

import argparse

from cmsf.cli.parser import Parser, apply_machine_flags
from cmsf.recipes.recipe import parse_value
from cmsf.utils.errors import BadInput

_OF_WEIGHTS = ("backbone", "size")


def add_weights_flags(parser: Parser) -> None:
    """Adds --init and what belongs to it, for `apply_weights`."""
    parser.add_options(
        {
            "--init WEIGHTS": "instead of a RUN: weights as they are, a timm name or a file, on the images of --data; "
            "a run of them is made in runs/",
            "--backbone NAME": "with --init: timm's name of the network, where the weights do not say it",
            "--init-by-order": "with --init: take the tensors of the file in their order, under whatever names",
            "--size N": "with --init: pixels of a view (default: auto)",
        }
    )


def apply_weights(chosen: argparse.Namespace) -> None:
    """Puts a run of the weights of --init where a RUN would be named, beside those that are."""
    named = chosen.runs if hasattr(chosen, "runs") else [run for run in (chosen.run,) if run is not None]
    settings = {name: parse_value(name, text) for name in _OF_WEIGHTS if (text := getattr(chosen, name)) is not None}
    settings |= {"init_by_order": True} if chosen.init_by_order else {}
    if chosen.init is None:
        if settings:
            raise BadInput(
                f"--{min(settings).replace('_', '-')} is for weights without a run; add --init, or leave it out"
            )
        if not named:
            command = chosen.command.__module__.rpartition(".")[2]
            raise BadInput(f"the following arguments are required: RUN; see cmsf {command} --help")
        return
    if chosen.data is None:
        raise BadInput(f"--init {chosen.init} needs images; add --data SOURCE")
    if named and not hasattr(chosen, "runs"):
        raise BadInput(f"give the run {chosen.run} or --init {chosen.init}, not both")

    from cmsf.api import from_weights

    device, workers = apply_machine_flags(chosen)
    settings |= {"skip_broken": True, "quiet": getattr(chosen, "quiet", False)}  # as with the images of --data
    run = str(from_weights(chosen.init, chosen.data, device=device, workers=workers, **settings).path)
    if hasattr(chosen, "runs"):
        chosen.runs = [*chosen.runs, run]
    else:
        chosen.run = run
    if not named:
        chosen.data = None  # its own
