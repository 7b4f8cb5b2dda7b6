"""`ciuic doctor`: look into a program that trains on several ranks, and say what is wrong with it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic.cli.doctor_loss import loss
from ciuic.cli.doctor_preflight import preflight
from ciuic.cli.output import Grid, JsonOption, print_grid, print_json, print_line, print_note
from ciuic.errors import RunFailedError, UsageError

if TYPE_CHECKING:
    from ciuic.doctor.finding import Incident, Severity
    from ciuic.doctor.launch import Outcome

app = typer.Typer(name="doctor", no_args_is_help=True, help="Name the cause when distributed training misbehaves.")
PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
app.command("preflight")(preflight)
app.command("loss", context_settings=PASSES_ON)(loss)


@app.command("run", context_settings=PASSES_ON)
def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program as you start it: torchrun ...")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Look closely at every step, whatever that costs (see overhead).")
    ] = False,
    every: Annotated[int, typer.Option(min=1, max=100_000, help="Steps from one close look to the next.")] = 10,
    stop_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help="End the program at a finding of this severity: warning, critical.")
    ] = "",
    folder: Annotated[Path | None, typer.Option(help="For evidence and findings; default doctor/DATE-TIME.")] = None,
    listen: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Where ranks of other machines report to.")] = "",
    collector: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Report to the doctor that runs on another machine.")
    ] = "",
    token: Annotated[str, typer.Option(envvar="CIUIC_DOCTOR_TOKEN", help="Of that doctor.")] = "",
    as_json: JsonOption = False,
) -> int:
    """Run a program and look into its ranks; the program itself is not changed.

    Exit code: the program's own; 7 when it succeeded and something critical was found, or when --stop-on ended it.
    With --json the program's own output goes to stderr.
    """
    from ciuic.doctor.environment import EVERY_STRICT
    from ciuic.doctor.finding import to_builtins
    from ciuic.doctor.launch import Launch, check, launch
    from ciuic.doctor.report.page import try_to_write
    from ciuic.doctor.report.text import incident_lines, report_lines

    if not command:
        raise UsageError("there is no program to run", next="ciuic doctor run -- torchrun --nproc-per-node 2 train.py")
    where = folder or Path("doctor") / time.strftime("%Y-%m-%d-%H%M%S")
    host, port = _listen(listen)
    options = Launch(
        command=command,
        folder=where,
        host=host,
        port=port,
        collector=_address(collector),
        token=token,
        every=EVERY_STRICT if strict else every,
        adapt=not strict,
        stop_on=_severity(stop_on),
        stdout_is_taken=as_json,
    )
    told: set[int] = set()

    def begun(address: str, secret: str) -> None:
        if listen:
            print_note(
                f"doctor: on other machines: CIUIC_DOCTOR_TOKEN={secret} ciuic doctor run --collector {address} -- ..."
            )

    def tell(incident: "Incident") -> None:
        told.add(id(incident))
        for line in incident_lines(incident):
            print_note(f"doctor: {line}")

    outcome = launch(options, told=tell, begun=begun)
    if collector:
        return outcome.exit_code
    page = try_to_write(where)
    if as_json:
        print_json(
            {**to_builtins(outcome.incidents, outcome.blind), "exit_code": outcome.exit_code, "folder": str(where)}
        )
    else:
        print_note("")
        for line in _summary(outcome):
            print_note(line)
        for line in report_lines(outcome.incidents, outcome.blind):
            print_line(line)
        print_note(f"with pictures: {page or where}; `ciuic doctor report {where}` shows this again")
    try:
        check(outcome)
    except RunFailedError as error:
        if not as_json:
            raise
        print_note(f"doctor: {error.message}")  # stdout has its one JSON document already
        return error.exit_code
    return outcome.exit_code


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `ciuic doctor run` named.")],
    html: Annotated[
        bool, typer.Option("--html", help="Write one HTML page, FOLDER/report.html, with pictures.")
    ] = False,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the page goes, with --html.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was found, again."""
    from ciuic.doctor.evidence import read_findings
    from ciuic.doctor.finding import to_builtins
    from ciuic.doctor.report.page import write_page
    from ciuic.doctor.report.text import report_lines

    if to is not None and not html:
        raise UsageError("--to names the HTML page, and none is asked for", next="add --html")
    if html:
        path = write_page(folder, to)
        if as_json:
            print_json({"page": str(path)})
        else:
            print_line(str(path))
        return
    incidents, blind = read_findings(folder)
    if as_json:
        print_json(to_builtins(incidents, blind))
        return
    for line in report_lines(incidents, blind):
        print_line(line)


@app.command("overhead")
def overhead(
    folder: Annotated[Path, typer.Argument(help="Folder that `ciuic doctor run` named.")], as_json: JsonOption = False
) -> None:
    """Show what the doctor has cost: processor time inside the steps, and bytes for each look."""
    from dataclasses import asdict

    from ciuic.doctor.report.overhead import overheads

    found = overheads(folder)
    if as_json:
        print_json([{**asdict(each), "share": each.share} for each in found])
        return
    rows = [
        (
            f"{each.rank}",
            f"{each.steps:,}",
            f"{each.looked_at:,}",
            f"{1e3 * each.step_s:.1f} ms",
            f"{1e3 * each.cost_s / max(1, each.steps):.3f} ms",
            f"{each.share:.2%}",
            f"{each.bytes_per_check}",
        )
        for each in found
    ]
    columns = ("rank", "steps", "looked at", "a step", "cost per step", "share", "bytes per look")
    print_grid(Grid(columns=columns, rows=rows, empty="no rank has made two steps that were looked at"))


@app.command("explain")
def explain(
    code: Annotated[str, typer.Argument(help="A code: A1 or CIUIC-A1; without it all are listed.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Say what a code means, how it is detected and how to fix it."""
    from dataclasses import asdict

    from ciuic.doctor.catalogue import code_of
    from ciuic.doctor.report.pages import index, page

    if not code:
        rows = index()
        if as_json:
            print_json([dict(zip(("code", "severity", "title"), row, strict=True)) for row in rows])
        else:
            print_grid(Grid(columns=("code", "severity", "what"), rows=rows))
        return
    found = code_of(code)
    if as_json:
        print_json(asdict(found))
    else:
        print_line(page(found).rstrip())


def _summary(outcome: "Outcome") -> list[str]:
    ranks, code = outcome.ranks, outcome.exit_code
    if not ranks:
        return [
            "the doctor has seen no rank: the program ended before it trained, or its Python is another one "
            "than the one in which ciuic is installed"
        ]
    steps = f"{outcome.looked} of {outcome.steps} step{'s' if outcome.steps > 1 else ''}"
    return [f"the program ended with exit code {code}; {ranks} rank{'s' if ranks > 1 else ''} looked at, in {steps}"]


def _severity(name: str) -> "Severity | None":
    from ciuic.doctor.finding import Severity

    if not name:
        return None
    if name not in list(Severity):
        raise UsageError(f"there is no severity {name}", next=f"one of {', '.join(Severity)}")
    return Severity(name)


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text} is not HOST or HOST:PORT", next="--listen 10.0.0.1 or --listen 10.0.0.1:29700")
    return host or "127.0.0.1", int(port)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and (not host or not port.isdecimal()):
        raise UsageError(f"{text} is not HOST:PORT", next="the line that the first doctor printed has it")
    return text
