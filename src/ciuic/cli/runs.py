"""Commands about runs: run, ps, status, sync, stop, resume."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import quote

import typer

from ciuic.cli.output import JsonOption, print_facts, print_grid, print_json, print_line
from ciuic.cli.profile import operator_client
from ciuic.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from ciuic.net.client import HubClient

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name as `ciuic ps` shows it.")]
OptionalRun = Annotated[str, typer.Argument(metavar="[RUN]", help="The run; the newest when left out.")]


def run_path(run_id: str) -> str:
    """The API path of a run; the name is from a person, so it is quoted."""
    return f"/v1/runs/{quote(run_id, safe='')}"


def newest_run(client: "HubClient") -> str:
    """The id of the newest run. Raises NotFoundError when there is none."""
    from ciuic.net.messages import RunInfo

    runs = client.call("GET", "/v1/runs", None, list[RunInfo])
    if not runs:
        raise NotFoundError("there are no runs yet", next="submit one with `ciuic run job.toml`")
    return max(runs, key=lambda run: run.created_at).run_id


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)],
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Submit and return at once.")] = False,
    submit_token: Annotated[
        str, typer.Option(help="The same token twice gives the same run, so a script may submit again safely.")
    ] = "",
    as_json: JsonOption = False,
) -> int:
    """Submit a job and watch it to its end.

    Ctrl-C only stops watching; the run goes on. Exit code 0 means that the run finished.
    """
    import secrets

    from ciuic.cli.watch import watch
    from ciuic.job import load_job
    from ciuic.net.messages import SubmitReply, SubmitRequest

    resolved = load_job(job)
    client = operator_client()
    request = SubmitRequest(job=resolved.to_dict(), submit_token=submit_token or secrets.token_hex(16))
    reply = client.call("POST", "/v1/runs", request, SubmitReply)
    if detach:
        if as_json:
            print_json(reply)
        else:
            print_line(reply.run_id)
        return 0
    if not as_json:
        done = "submitted" if reply.created else "was already submitted"
        print_line(f"{reply.run_id} {done}; ctrl-c stops watching, not the run")
    return watch(client, reply.run_id, as_json=as_json)


def ps(as_json: JsonOption = False) -> None:
    """List the runs, the newest first."""
    from ciuic.cli import views
    from ciuic.net.messages import RunInfo

    runs = operator_client().call("GET", "/v1/runs", None, list[RunInfo])
    if as_json:
        print_json(runs)
    else:
        print_grid(views.runs_grid(runs, time.time()))


def status(run_id: OptionalRun = "", as_json: JsonOption = False) -> None:
    """Show one run and its nodes."""
    from ciuic.cli import views
    from ciuic.net.messages import RunInfo

    client = operator_client()
    info = client.call("GET", run_path(run_id or newest_run(client)), None, RunInfo)
    if as_json:
        print_json(info)
        return
    if verdict := views.verdict_facts(info):
        print_facts(verdict)
        print_line("")
    if findings := views.finding_facts(info):
        print_facts(findings)
        print_line("")
    print_facts(views.run_facts(info, time.time()))
    print_line("")
    print_grid(views.run_nodes_grid(info))


def sync(
    run_id: RunArgument,
    policy: Annotated[Literal["sync", "async"] | None, typer.Option(help="When the hub makes a new version.")] = None,
    interval: Annotated[int | None, typer.Option(help="Steps per push of a node of average speed.", min=1)] = None,
    compression: Annotated[str, typer.Option(help="A codec for both directions, or UP,DOWN.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Change how the nodes of a run at work synchronise, from its next round on."""
    from ciuic.net.messages import Ok, SyncRequest

    up, _, down = compression.partition(",")
    request = SyncRequest(policy=policy or "", interval=interval or 0, codec_up=up, codec_down=down or up)
    if request == SyncRequest():
        raise UsageError("there is nothing to change", next="give --policy, --interval or --compression")
    reply = operator_client().call("POST", f"{run_path(run_id)}/sync", request, Ok)
    if as_json:
        print_json(reply)
    else:
        print_line(f"{run_id} changes with its next round; `ciuic status {run_id}` shows it")


def stop(run_id: RunArgument, as_json: JsonOption = False) -> None:
    """Stop a run; its ledger stays.

    The nodes push what they have and leave; `ciuic resume` goes on from there.
    """
    _tell(run_id, "stop", "is stopping", as_json=as_json)


def resume(run_id: RunArgument, as_json: JsonOption = False) -> None:
    """Go on with a stopped or failed run."""
    _tell(run_id, "resume", "goes on", as_json=as_json)


def _tell(run_id: str, verb: str, done: str, *, as_json: bool) -> None:
    from ciuic.net.messages import Ok

    reply = operator_client().call("POST", f"{run_path(run_id)}/{verb}", None, Ok)
    if as_json:
        print_json(reply)
    else:
        print_line(f"{run_id} {done}")
