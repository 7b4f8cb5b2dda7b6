"""`ciuic node`: join a network, check this machine, drain, leave."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ciuic.cli import keeping
from ciuic.cli.output import Grid, JsonOption, print_grid, print_json, print_line
from ciuic.cli.profile import ciuic_home
from ciuic.errors import CheckFailedError, TokenError, UsageError

app = typer.Typer(help="Make this machine a node.")

MAX_TOKEN_BYTES = 8192

HomeOption = Annotated[Path | None, typer.Option(help="Folder for everything the node keeps [CIUIC_HOME].")]


@app.command("join")
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="The hub, for example https://hub.example:8443.")],
    location: Annotated[str, typer.Option(help="Where this node is, a name like us-west.")],
    token: Annotated[
        str,
        typer.Option(help="The join token. Other users of this machine can see it here: rather use CIUIC_TOKEN."),
    ] = "",
    token_file: Annotated[Path | None, typer.Option(help="A file that holds the join token.")] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="What this node has, like gpu=8 or bandwidth=10 (Gbit/s)."),
    ] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Let jobs run their own code here.")] = False,
    direct: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen here for other nodes, which then need not go by the hub.")
    ] = "",
    direct_name: Annotated[str, typer.Option(help="Name by which they dial, where it is not that of --direct.")] = "",
    home: HomeOption = None,
) -> int:
    """Join a network and stay as its agent.

    The agent runs in the foreground and dials out; nothing listens unless --direct is given. Without a token it comes
    back as the node that it was before.
    """
    place = parse_direct(direct, direct_name)
    claimed, found_token = parse_claims(claim or []), read_token(token, token_file)
    from ciuic.cli.log import log_to_stderr
    from ciuic.node.agent import run_agent
    from ciuic.node.config import AgentConfig

    config = AgentConfig(
        url=url,
        location=location,
        token=found_token or None,
        claimed=claimed,
        allow_code=allow_code,
        home=ciuic_home(home),
        direct=place,
        direct_name=direct_name,
    )
    log_to_stderr()
    return run_agent(config)


def parse_direct(direct: str, name: str) -> tuple[str, int] | None:
    """Where to listen for other nodes; None: nowhere. Raises UsageError."""
    from ciuic.net.names import is_direct_name

    if not direct:
        if name:
            raise UsageError("--direct-name was given without --direct", next="add --direct HOST:PORT")
        return None
    host, _, port = direct.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{direct!r} is no place to listen", next="write for example --direct 192.0.2.7:8444")
    if not is_direct_name(name or host):
        raise UsageError(
            f"other nodes cannot dial {name or host!r}", next="give their name for this machine with --direct-name"
        )
    return host, int(port)


def read_token(token: str, token_file: Path | None) -> str:
    """The token from the option, the file or $CIUIC_TOKEN, in this order; "" when there is none."""
    if token and token_file is not None:
        raise UsageError("--token and --token-file were both given", next="give one of them")
    if token_file is None:
        return (token or os.environ.get("CIUIC_TOKEN", "")).strip()
    try:
        with token_file.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES).decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"{token_file} cannot be read", cause=(error.strerror or str(error)).lower()) from error
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise TokenError(f"{token_file} does not hold a token", next="write the line of `ciuic hub token create` to it")
    return text


def parse_claims(claims: list[str]) -> dict[str, float]:
    """`["gpu=8", "bandwidth_gbit_s=10"]` as numbers by name. Raises UsageError naming the one that is not."""
    found: dict[str, float] = {}
    for claim in claims:
        name, separator, number = claim.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not separator or not name.strip().isidentifier() or not 0 <= value < float("inf"):
            raise UsageError(f"{claim!r} is not a claim", next="write for example --claim gpu=8")
        found[name.strip()] = value
    return found


@app.command("check")
def check(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The hub; by default the one joined.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine and its way to the hub.

    Without URL the hub that this machine has joined is checked.
    """
    from ciuic.node.check import run_checks

    results = run_checks(url or None, ciuic_home(home))
    failed = [result.name for result in results if not result.ok]
    if as_json:  # one document: the results say what failed
        print_json(results)
        return CheckFailedError.exit_code if failed else 0
    rows = [(check.name, "ok" if check.ok else "FAILED", check.detail, check.next) for check in results]
    print_grid(Grid(columns=("check", "", "found", "next"), rows=rows))
    if failed:
        raise CheckFailedError(
            f"this machine cannot take part yet: {', '.join(failed)}", next="put right what the table says"
        )
    return 0


@app.command("drain")
def drain(
    location: Annotated[str, typer.Option(help="Which node, when this machine has several.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Take work again.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let this machine's node take no new work, but stay in the network.

    It finishes its step and pushes; its leased samples go back to the others. `ciuic node leave` also takes it out of
    the network.
    """
    from ciuic.cli.leaving import drain_agent

    node_id = drain_agent(ciuic_home(home), location, undo=undo).node_id
    if as_json:
        print_json({"node_id": node_id, "state": "idle" if undo else "draining"})
    elif undo:
        print_line(f"{node_id} takes work again")
    else:
        print_line(f"{node_id} is draining: it finishes its step, pushes and takes no new work")


@app.command("leave")
def leave(
    location: Annotated[str, typer.Option(help="Which node, when this machine has several.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take this machine's node out of its network.

    A running agent lets its worker finish the step and push. The identity stays: `ciuic node join` comes back with it.
    """
    from ciuic.cli.leaving import leave_network

    node_id = leave_network(ciuic_home(home), location).node_id
    if as_json:
        print_json({"node_id": node_id, "state": "left"})
    else:
        print_line(f"{node_id} has left")


keeping.register_node(app)
