"""`ciuic lab`: a network of far places on this machine, to try things on and to break them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from ciuic.cli.lab_sim import sim
from ciuic.cli.output import Grid, JsonOption, print_facts, print_grid, print_json, print_line, print_note
from ciuic.errors import CheckFailedError, CiuicError, RunFailedError, UsageError, error_from_dict
from ciuic.units import format_duration, parse_duration_s, parse_rate

app = typer.Typer(help="Emulate far places on this machine, and break things on purpose.")

FolderOption = Annotated[
    Path | None, typer.Option(help="Folder of the lab [CIUIC_HOME when a lab has made it, else ./lab].")
]
RelayOption = Annotated[
    bool, typer.Option("--relay", help="Emulate links with relays although this machine could make namespaces.")
]
DOWN_S = 60.0


@app.command("up")
def up(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="One of `ciuic lab profiles`.")] = "continents",
    nodes: Annotated[int, typer.Option(min=0, max=64, help="How many sites; 0: as many as the profile has.")] = 0,
    hub_rate: Annotated[str, typer.Option(help="The hub's own link each way, like 1Gbit/s (namespaces only).")] = "",
    bare: Annotated[bool, typer.Option("--bare", help="Places and links only: no hub and no agents.")] = False,
    relay: RelayOption = False,
    seed: Annotated[int, typer.Option(min=0, help="Of losses and jitter.")] = 0,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a lab in the background.

    One hub and one agent per site as real processes, joined over emulated links: network namespaces with real kernel
    TCP for root, relays of streams for everybody else.
    """
    from ciuic.lab.lab_state import already_up, folder_of_lab, is_up

    where = folder_of_lab(folder)
    if is_up(where):
        raise already_up(where)
    wish: dict[str, Any] = {"folder": str(where), "profile": profile, "nodes": nodes, "bare": bare, "seed": seed}
    wish["namespaces"] = use_namespaces(relay=relay)
    if hub_rate:
        if not wish["namespaces"]:
            raise UsageError("a relay has no link of the hub's own", next="leave out --hub-rate, or run as root")
        wish["hub_bits_per_s"] = parse_rate(hub_rate)
    ready = _start_keeper(wish, quiet=as_json)
    if as_json:
        print_json({"folder": str(where), "profile": profile, "namespaces": wish["namespaces"], **ready})
        return
    for line in _how_to_go_on(where, ready["places"], bare=bare):
        print_line(line)


def use_namespaces(*, relay: bool) -> bool:
    """Whether the lab stands on namespaces; says why not, where it cannot."""
    from ciuic.lab.namespaces import why_not_here

    reason = "" if relay else why_not_here()
    if reason:
        print_note(f"links are relays of streams (no packet loss): {reason}, so there are no network namespaces")
    return not relay and not reason


def _start_keeper(wish: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """What the lab says of itself once it is ready. Raises what its process raised, RunFailedError."""
    from ciuic.lab.lab_state import LOG

    keeper = subprocess.Popen(
        [sys.executable, "-m", "ciuic.lab.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # ctrl-c of a later command is not for the lab
    )
    try:
        if keeper.stdin is None or keeper.stdout is None:
            raise RunFailedError("the lab's process has no pipes")
        with keeper.stdin as pipe:
            pipe.write(json.dumps(wish).encode())
        with keeper.stdout as lines:
            for line in lines:
                told = json.loads(line)
                if "ok" in told:
                    return told["ok"]
                if "error" in told:
                    raise error_from_dict(told["error"])
                if not quiet:
                    print_line(told["say"])
    except BaseException:
        keeper.terminate()
        keeper.wait(DOWN_S)
        raise
    raise RunFailedError(
        f"the lab's process ended with exit code {keeper.wait()}", next=f"read {Path(wish['folder']) / LOG}"
    )


def _how_to_go_on(folder: Path, places: list[str], *, bare: bool) -> list[str]:
    lines = [f"the lab is up in {folder}: {', '.join(places)}"]
    if not bare:
        lines += ["train over it:", f"  export CIUIC_HOME={folder}", "  ciuic nodes; ciuic run JOB.toml"]
    first = places[1]
    return [
        *lines,
        "break it, look at it, end it:",
        f"  ciuic lab fault {first} cut --for 30s",
        "  ciuic lab status; ciuic lab down",
    ]


@app.command("exec")
def exec_command(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="`hub` or a site.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run there.")],
    folder: FolderOption = None,
) -> None:
    """Run a command at a place of the lab.

    In its network namespace (root), or, with relays, on this machine. CIUIC_HOME is the one of the place's hub or
    agent, CIUIC_LAB_HUB the hub's address as the place sees it.
    """
    from ciuic.lab import switch_enter
    from ciuic.lab.lab_state import find_lab, folder_of_lab

    state = find_lab(folder_of_lab(folder))
    if place not in state.places:
        raise UsageError(f"the lab has no place {place!r}", next=f"one of {', '.join(state.places)}")
    argv = list(command)
    if handle := state.namespaces.get(place):
        if os.geteuid() != 0:
            raise UsageError("only root may enter the lab's namespaces", next="run this with sudo")
        argv = [sys.executable, "-I", "-S", switch_enter.__file__, handle, "0", *argv]
    try:
        os.execvpe(argv[0], argv, {**os.environ, **state.environment[place]})
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started", cause=(error.strerror or str(error)).lower()) from error


@app.command("fault")
def fault(
    where: Annotated[str, typer.Argument(metavar="PLACE|A-B", help="A place, or two: the way between them.")],
    kind: Annotated[str, typer.Argument(help="See `ciuic lab faults`.")],
    value: Annotated[str, typer.Argument(help="For delay, rate and loss: 200ms, 5Mbit/s, 1%.")] = "",
    lasting: Annotated[str, typer.Option("--for", metavar="DURATION", help="Undo it after so long, like 30s.")] = "",
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do something to a place, a link or a process of the lab."""
    from ciuic.lab.faults import Order
    from ciuic.lab.lab_state import ask_lab, folder_of_lab

    for_s = parse_duration_s(lasting) if lasting else None
    Order(where=where, kind=kind, value=value, for_s=for_s)  # refuses what cannot be, before the lab is asked
    done = ask_lab(folder_of_lab(folder), do="fault", where=where, kind=kind, value=value, for_s=for_s)
    if as_json:
        print_json(done)
    else:
        print_line(done["done"])


@app.command("faults")
def faults(as_json: JsonOption = False) -> None:
    """List what `ciuic lab fault` can do."""
    from ciuic.lab.faults import KINDS

    if as_json:
        print_json(KINDS)
    else:
        print_grid(Grid(columns=("kind", "what it does"), rows=list(KINDS.items())))


@app.command("profiles")
def profiles(as_json: JsonOption = False) -> None:
    """List the emulated networks that there are."""
    from ciuic.lab.profiles import PROFILES, describe

    found = {name: describe(name) for name in PROFILES}
    if as_json:
        print_json(found)
    else:
        print_grid(Grid(columns=("profile", "what it is"), rows=list(found.items())))


@app.command("status")
def status(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Show the places, links, processes and faults of the lab."""
    from ciuic.lab.lab_state import ask_lab, folder_of_lab

    where = folder_of_lab(folder)
    found = ask_lab(where, do="status")
    if as_json:
        print_json({"folder": str(where), **found})
        return
    facts = [(name, str(found[name])) for name in ("profile", "network", "hub", "pid")]
    print_facts([("folder", str(where)), *facts])
    print_line("")
    columns = ("place", "process", "link", "to the hub")
    print_grid(Grid(columns=columns, rows=[tuple(row[name] for name in columns) for row in found["places"]]))
    for active in found["faults"]:
        print_line(f"{active['fault']}: over in {format_duration(active['left_s'])}")


@app.command("down")
def down(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """End the lab: all its processes, links and places.

    What it wrote stays in the folder until the next `ciuic lab up` there.
    """
    from ciuic.lab.lab_state import ask_lab, find_lab, folder_of_lab

    where = folder_of_lab(folder)
    state = find_lab(where)
    with contextlib.suppress(CiuicError):  # it does not listen any more: it gets a signal
        ask_lab(where, do="down")
    _end(where, state.pid)
    if as_json:
        print_json({"folder": str(where), "pid": state.pid, "state": "down"})
    else:
        print_line(f"the lab in {where} is down")


def _end(folder: Path, pid: int) -> None:
    """Until the process that holds the folder's lock has ended; it is asked, then signalled, then killed."""
    import signal

    from ciuic.lab.lab_state import is_up

    for number, patience_s in ((0, DOWN_S), (signal.SIGTERM, DOWN_S), (signal.SIGKILL, DOWN_S)):
        if not is_up(folder):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        until = time.monotonic() + patience_s
        while is_up(folder) and time.monotonic() < until:
            time.sleep(0.05)
    if is_up(folder):
        raise RunFailedError(f"process {pid} keeps the lab in {folder} and does not end")


@app.command("soak")
def soak(
    duration: Annotated[str, typer.Option(help="How long faults are made, like 2h or 3min.")] = "2h",
    every: Annotated[str, typer.Option(help="Time from one fault to the next.")] = "30s",
    seed: Annotated[int, typer.Option(min=0, help="Of the faults: the same seed makes the same ones again.")] = 0,
    nodes: Annotated[int, typer.Option(min=2, max=16, help="How many nodes train.")] = 3,
    relay: RelayOption = False,
    folder: Annotated[Path, typer.Option(help="For logs, state and soak.json.")] = Path("soak"),
    as_json: JsonOption = False,
) -> int:
    """Train while things fail, and prove that nothing is lost.

    Run after run, and fault after fault. Ends with exit code 7, the history of the faults and the first property that
    did not hold, when one does not.
    """
    from ciuic.lab.soak import SoakConfig, run_soak

    config = SoakConfig(
        folder=folder.expanduser().resolve(),
        duration_s=parse_duration_s(duration),
        every_s=parse_duration_s(every),
        seed=seed,
        nodes=nodes,
        namespaces=use_namespaces(relay=relay),
    )
    with _people_read_stderr(as_json):
        report = run_soak(config, print_line)
    if as_json:
        print_line((config.folder / "soak.json").read_text().rstrip())
    return 0 if report.holds else CheckFailedError.exit_code


@contextlib.contextmanager
def _people_read_stderr(as_json: bool) -> Generator[None]:
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


app.command("sim")(sim)
