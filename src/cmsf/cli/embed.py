"""The vectors that cmsf evaluate rests on, a row for each image, with its path, class and split: L2-normalised
features of clean views. An .npz holds arrays for numpy; a .parquet opens in pandas, pyarrow and DuckDB. The same
command goes on where it was stopped."""

from __future__ import annotations

import argparse

from cmsf.cli.parser import SOURCE_HELP, Parser, apply_machine_flags, print_line, print_paths
from cmsf.cli.weights import add_weights_flags, apply_weights
from cmsf.runs.requests import EMBEDDING_SUFFIXES, check_run
from cmsf.utils.files import check_out

HELP = "features of images, in a file"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run folder")
    parser.add_argument("--data", metavar="SOURCE", help=f"other images than the run's: {SOURCE_HELP}")
    parser.add_argument(
        "--out", metavar="FILE", default="features.parquet", help="an .npz or .parquet (default: features.parquet)"
    )
    add_weights_flags(parser)
    parser.add_machine_flags()


def execute(chosen: argparse.Namespace) -> int:
    check_out(chosen.out, *EMBEDDING_SUFFIXES)
    apply_weights(chosen)
    check_run(chosen.run)

    from cmsf.runs.run import Run

    device, workers = apply_machine_flags(chosen)
    written = Run(chosen.run).embed_to_file(chosen.out, chosen.data, device, workers)
    print_line(f"{written.rows:,} images, {written.width:,} features each")
    print_paths({"features": written.path})
    return 0
