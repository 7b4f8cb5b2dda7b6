"""`ciuic bench`: benchmarks need torch, so each runs as a process of its own."""

import subprocess
import sys
from typing import Annotated

import typer

from ciuic.bench.names import NAMES
from ciuic.cli.output import Grid, print_grid, print_line

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options of the benchmark itself go to it, --help included."""
HELP = ("-h", "--help")


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> int:
    """Measure ratios to a reference in the same run; `ciuic bench NAME --help` shows its options."""
    if not name or name in HELP:
        print_line("Usage: ciuic bench NAME [--json] [--folder FOLDER] [its own options]\n")
        print_grid(Grid(columns=("name", "measures"), rows=list(NAMES.items())))
        print_line("\n`ciuic bench NAME --help` shows the options of one; results go to --folder, bench/ here.")
        return 0
    command = [sys.executable, "-m", "ciuic.bench", name, *(["--json"] if as_json else []), *context.args]
    return subprocess.run(command, check=False).returncode
