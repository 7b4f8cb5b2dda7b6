"""`ciuic bench`: benchmarks need torch, so each runs as a process of its own."""

import subprocess
import sys
from typing import Annotated

import typer

from ciuic.bench.names import NAMES

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options of the benchmark itself go to it."""


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"Which one: {', '.join(NAMES)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> int:
    """Measure ratios to a reference in the same run; `ciuic bench NAME --help` shows its options."""
    command = [sys.executable, "-m", "ciuic.bench", name, *(["--json"] if as_json else []), *context.args]
    return subprocess.run(command, check=False).returncode
