"""Commands that need no hub: demo, dash (a proxy on this machine), env, schema."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ciuic.cli.output import JsonOption, print_facts, print_json, print_line
from ciuic.cli.profile import ciuic_home, load_operator_profile


def demo(
    folder: Annotated[Path, typer.Option(help="Folder for the report, the picture and the state.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run with the same story.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the model, the data order and the links.")] = 0,
    as_json: JsonOption = False,
) -> int:
    """Train a small DeepSeek on three continents.

    Three nodes on this machine train one model over emulated links; one is killed and comes back; the report is
    written to the folder.
    """
    from ciuic.lab.demo import DemoConfig, run_demo

    config = DemoConfig(folder=folder, quick=quick, seed=seed)
    if not as_json:
        return run_demo(config)
    with contextlib.redirect_stdout(sys.stderr):  # what a person reads; only the report goes to standard output
        code = run_demo(config)
    print_line((folder / "report.json").read_text().rstrip())
    return code


def dash(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 takes a free one.")] = 8450,
) -> int:
    """Open the live page in a browser.

    A local proxy shows the operator's certificate to the hub, so that the browser needs none.
    """
    from ciuic.cli.dash_proxy import run_dash

    return run_dash(load_operator_profile(), port)


def env(as_json: JsonOption = False) -> None:
    """Print what to paste into a bug report.

    Versions and facts of this machine.
    """
    from ciuic.cli.facts import environment

    facts = environment(ciuic_home())
    if as_json:
        print_json(facts)
    else:
        print_facts(facts.items())


def schema(as_json: JsonOption = False) -> None:
    """Print the JSON schema of the job file."""
    from ciuic.job import job_schema

    print_line(json.dumps(job_schema(), indent=None if as_json else 2))
