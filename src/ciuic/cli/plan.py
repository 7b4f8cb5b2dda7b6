"""`ciuic plan`: the resolved job, the links, and which codec and interval a run would use."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ciuic.cli.output import JsonOption, print_grid, print_json, print_line
from ciuic.errors import UsageError


def plan(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="The job file; an empty job when left out.")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Only these nodes of the hub, by name: us-west,eu-central.")] = "",
    link: Annotated[
        str, typer.Option(metavar="RATE[,RATE]", help="Ask no hub: a link like 20Mbit/s, or up,down.")
    ] = "",
    rtt: Annotated[str, typer.Option(help="Round trip of --link; 50 ms when left out.")] = "",
    count: Annotated[int | None, typer.Option(min=1, max=10_000, help="Number of nodes with --link.")] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds per optimizer step.")] = None,
    parameters: Annotated[str, typer.Option(help="Size of the model, like 5M; else it is counted.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Show what a job would do before it runs.

    Every setting with its source, the measured links, the codec and interval that suit them, and why. Without a hub:
    --link 20Mbit/s --rtt 150ms --step-s 0.6.
    """
    from ciuic.cli import plan_inputs as inputs
    from ciuic.cli import plan_views as views

    given = inputs.given_job(job)
    if not link and (rtt or count):
        raise UsageError("--rtt and --count describe an imagined link", next="give --link too, for example 20Mbit/s")
    if link:
        listed = inputs.imagined_nodes(link, rtt or "50 ms", count or max(2, given.job.nodes.min), step_s)
    else:
        listed = inputs.nodes_of_hub(given.job, [name for name in nodes.split(",") if name], step_s)
    model = inputs.shape_of_job(given.job, parameters)
    found = views.make_plan(given, listed, model, is_what_if=bool(link))
    if as_json:
        print_json(views.as_json(found))
        return
    for part in views.as_text(found, shutil.get_terminal_size().columns):
        if isinstance(part, str):
            print_line(part)
        else:
            print_grid(part)
