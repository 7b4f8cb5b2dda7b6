"""`ciuic doctor preflight`: is this machine, and are all nodes together, ready for a distributed run?"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic.cli.output import Grid, JsonOption, print_grid, print_json, print_line
from ciuic.errors import CheckFailedError
from ciuic.units import parse_duration_s

if TYPE_CHECKING:
    from ciuic.doctor.preflight.records import Check, Report, Settings

SHOWN = {"ok": "ok", "warn": "warn", "fail": "FAILED", "could-not-look": "could not look"}


def preflight(
    nnodes: Annotated[int, typer.Option(help="How many nodes; each runs this command.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    nproc: Annotated[int, typer.Option(help="Training processes on each node.")] = 1,
    master: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where they meet: an address of node rank 0. [MASTER_ADDR, MASTER_PORT]"
        ),
    ] = "",
    wait: Annotated[str, typer.Option(help="How long to wait for the other nodes.")] = "60 s",
    count: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="Builds the model; parameters and layout are compared.")
    ] = "",
    as_json: JsonOption = False,
) -> int:
    """Look before a run: network interfaces, master, versions, shared memory, limits, environment, clocks, model.

    On one machine alone, or on N nodes at the same time with --nnodes, --node-rank and --master, as for torchrun. The
    exit code is 7 on every node when something fails anywhere.
    """
    from ciuic.doctor.preflight.records import Settings
    from ciuic.doctor.preflight.run import parse_place, run_preflight

    if not master and os.environ.get("MASTER_ADDR"):
        master = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT') or '29500'}"
    host, port = parse_place(master) if master else ("", 0)
    settings = Settings(
        nnodes=nnodes,
        node_rank=node_rank,
        nproc=nproc,
        host=host,
        port=port,
        wait_s=parse_duration_s(wait),
        count=count,
    )
    report = run_preflight(settings, os.environ, Path.cwd())
    failed = sorted({check.name for check in report.checks if check.result == "fail"})
    if as_json:  # one document: the checks say what failed
        print_json({"result": report.result, "nnodes": report.nnodes, "met": report.met, "checks": report.checks})
        return CheckFailedError.exit_code if failed else 0
    print_grid(_grid(report, settings))
    print_line(_summary(report))
    if failed:
        raise CheckFailedError(f"not ready for a run: {', '.join(failed)}", next="put right what the table says")
    return 0


def _grid(report: "Report", settings: "Settings") -> Grid:
    """Everything about this node and all together; of other nodes what is not ok."""
    rows = [
        (check.name, _whose(check), SHOWN[check.result], check.detail, check.next)
        for check in report.checks
        if check.rank in (None, settings.node_rank) or check.result != "ok"
    ]
    grid = Grid(columns=("check", "rank", "", "found", "next"), rows=rows)
    return grid if settings.nnodes > 1 else grid.without("rank")


def _whose(check: "Check") -> str:
    return "all" if check.rank is None else str(check.rank)


def _summary(report: "Report") -> str:
    results = [check.result for check in report.checks]
    counts = ", ".join(f"{results.count(kind)} {text.lower()}" for kind, text in SHOWN.items() if kind in results)
    nodes = f"; {report.met} of {report.nnodes} nodes" if report.nnodes > 1 else ""
    return f"{counts}{nodes}"
