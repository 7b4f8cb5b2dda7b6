"""`ciuic hub`: start a hub, look at it, make join tokens."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ciuic.cli import hub_access, keeping
from ciuic.cli.output import JsonOption, print_facts, print_grid, print_json, print_line, print_note
from ciuic.cli.profile import ciuic_home, operator_client
from ciuic.errors import UsageError
from ciuic.units import format_duration, parse_duration_s

app = typer.Typer(help="Start and manage a hub.")
token_app = typer.Typer(help="Tokens with which machines join.")
app.add_typer(token_app, name="token")


@app.command("start")
def start(
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 keeps the hub on this machine.")] = (
        "0.0.0.0"  # noqa: S104 - nodes come from other machines; all but joining needs a certificate
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8443,
    name: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address by which nodes reach the hub, for its certificate (repeatable)."),
    ] = None,
    url: Annotated[str, typer.Option(help="URL to write into join tokens, when it is not the first name.")] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="How much one caller may ask, like connections=2000 (repeatable)."),
    ] = None,
    keep_events: Annotated[str, typer.Option(help="How long events are kept; those of open runs stay.")] = "90 d",
    keep_logs: Annotated[str, typer.Option(help="How long log lines are kept; those of open runs stay.")] = "30 d",
    keep_ledgers: Annotated[
        str, typer.Option(help="So long after its end, only the last snapshot of a finished run stays.")
    ] = "30 d",
    home: Annotated[Path | None, typer.Option(help="Folder for everything the hub keeps [CIUIC_HOME].")] = None,
) -> int:
    """Start the hub, in the foreground.

    The first start makes the certificate authority and a certificate for you, its operator.
    """
    from ciuic.hub.access.limits import LimitSettings
    from ciuic.hub.config import HubConfig
    from ciuic.hub.server import serve

    limits = LimitSettings().changed(limit or [])
    names = tuple(name or ())
    config = HubConfig(
        home=ciuic_home(home),
        host=host,
        port=port,
        names=names,
        public_url=url,
        keep_events_s=parse_duration_s(keep_events),
        keep_logs_s=parse_duration_s(keep_logs),
        keep_ledgers_s=parse_duration_s(keep_ledgers),
        limits=limits,
    )
    return serve(config)


@app.command("status")
def status(as_json: JsonOption = False) -> None:
    """Show the hub, its nodes and its runs."""
    from ciuic.cli import node_views, views
    from ciuic.net.messages import HubInfo

    info = operator_client().call("GET", "/v1/hub", None, HubInfo)
    if as_json:
        print_json(info)
        return
    now = time.time()
    print_facts(views.hub_facts(info, now))
    print_line("")
    print_grid(node_views.nodes_grid(info.nodes, now))
    print_line("")
    print_grid(views.runs_grid(info.runs, now))


@app.command("shard")
def shard(
    name: Annotated[str, typer.Option(help="Name of this shard in the network, like s1.")],
    join: Annotated[
        str, typer.Option(envvar="CIUIC_TOKEN", help="Token for a shard [CIUIC_TOKEN]; needed the first time.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = (
        "0.0.0.0"  # noqa: S104 - nodes come from other machines; everything needs a certificate
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8444,
    url: Annotated[str, typer.Option(help="URL by which nodes and other shards reach this one.")] = "",
    home: Annotated[Path | None, typer.Option(help="Folder for everything it keeps [CIUIC_HOME].")] = None,
) -> int:
    """Serve fragments of runs for a hub, in the foreground."""
    from ciuic.hub.shards.config import ShardConfig
    from ciuic.hub.shards.server import serve_shard

    return serve_shard(ShardConfig(home=ciuic_home(home), name=name, join=join, host=host, port=port, url=url))


@app.command("shards")
def shards(
    run: Annotated[str, typer.Argument(help="The run.")],
    rebalance: Annotated[bool, typer.Option("--rebalance", help="Move fragments so that the load is even.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which shard serves which fragment of a run, and what each carries."""
    from ciuic.cli.shard_views import shard_lines
    from ciuic.net.shard_messages import ShardsInfo

    client = operator_client()
    method, what = ("POST", "rebalance") if rebalance else ("GET", "shards")
    info = client.call(method, f"/v1/runs/{run}/{what}", None, ShardsInfo)
    if as_json:
        print_json(info)
        return
    for line in shard_lines(info, started=rebalance):
        print_line(line)


@token_app.command("create")
def create_token(
    lifetime: Annotated[str, typer.Option(help="How long it can be used, for example 30 min or 7 d.")] = "24 h",
    uses: Annotated[int, typer.Option(min=1, help="How many machines may join with it.")] = 1,
    role: Annotated[str, typer.Option(help="What joins: node, operator, viewer or shard.")] = "node",
    as_json: JsonOption = False,
) -> None:
    """Make a join token and print it.

    Treat it like a password until it is used.
    """
    from ciuic.net.messages import CreateTokenReply, CreateTokenRequest
    from ciuic.net.tokens import parse_token

    lifetime_s = parse_duration_s(lifetime)
    if role not in ("node", "operator", "viewer", "shard"):
        raise UsageError(f"there is no role {role!r}", next="use node, operator, viewer or shard")
    request = CreateTokenRequest(lifetime_s=lifetime_s, uses=uses, role=role)
    client = operator_client()
    reply = client.call("POST", "/v1/tokens", request, CreateTokenReply)
    if as_json:
        print_json(reply)
        return
    machines = "one machine" if uses == 1 else f"{uses} machines"
    print_note(f"a token for {machines}, valid for {format_duration(lifetime_s)}; on each machine:")
    if role == "shard":
        print_note("  CIUIC_TOKEN=<the token> ciuic hub shard --name <a name like s1> --url https://<its host>:8444")
    else:
        print_note(
            f"  CIUIC_TOKEN=<the token> ciuic node join {parse_token(reply.token).url} --location <a name like us-west>"
        )
    print_line(reply.token)


hub_access.register(app, token_app)
keeping.register_hub(app)
