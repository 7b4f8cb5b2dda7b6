"""`ciuic nodes`: what each node claims beside what was measured; measure again, show, evict."""

import time
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from ciuic.cli.output import JsonOption, print_facts, print_grid, print_json, print_line, print_note
from ciuic.cli.profile import operator_client
from ciuic.errors import NotFoundError, UsageError
from ciuic.units import parse_duration_s

if TYPE_CHECKING:
    from ciuic.net.client import HubClient
    from ciuic.net.messages import NodeInfo

app = typer.Typer(help="List the nodes of the network, measure them, show one, evict one.", no_args_is_help=False)

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name as `ciuic nodes` shows it.")]


@app.callback(invoke_without_command=True)
def list_nodes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the nodes of the network: what each claims, what was measured and when, what it does."""
    if context.invoked_subcommand is not None:
        return
    from ciuic.cli import node_views

    found = fetch_nodes(operator_client())
    if as_json:
        print_json(found)
    else:
        print_grid(node_views.nodes_grid(found, time.time()))


@app.command("show")
def show(node: NodeArgument, as_json: JsonOption = False) -> None:
    """Show everything that is known of one node."""
    from ciuic.cli import node_views

    (found,) = pick(fetch_nodes(operator_client()), [node])
    if as_json:
        print_json(found)
        return
    print_facts(node_views.node_facts(found, time.time()))
    print_line("")
    print_grid(node_views.quantities_grid(found))


@app.command("measure")
def measure(
    names: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Which; all that are here.")] = None,
    wait: Annotated[str, typer.Option(help="How long to wait for each node.")] = "3 min",
    together: Annotated[bool, typer.Option("--together", help="All at once, sharing the hub's link.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Let nodes measure themselves now and print what they found.

    One after the other, since they share the hub's link. A node that trains measures only its round trip and what is
    free; the rest waits until it has nothing to do.
    """
    from ciuic.cli import node_views
    from ciuic.cli.measuring import measure_nodes

    limit_s = parse_duration_s(wait)
    outcome = measure_nodes(operator_client(), names or [], limit_s=limit_s, together=together, say=print_note)
    if as_json:
        print_json(outcome.nodes)
    else:
        print_grid(node_views.measured_grid(outcome.nodes, time.time()))
        for line in outcome.remarks:
            print_note(line)
    return outcome.exit_code


@app.command("links")
def links(as_json: JsonOption = False) -> None:
    """Show what each pair of nodes has between them.

    Where a node offers direct connections, what `ciuic nodes measure` found on them; else the way leads through the
    hub, and rates and round trips are computed from the two measured links.
    """
    from ciuic.cli import node_views

    found = node_views.links_between(fetch_nodes(operator_client()))
    if as_json:
        print_json([link.as_dict() for link in found])
        return
    print_grid(node_views.links_grid(found))
    if any(link.way != node_views.DIRECT for link in found):
        print_note("through the hub: rates and round trips are computed from the two links")


@app.command("evict")
def evict(
    node: NodeArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a node out of the network for good.

    Its certificate is no longer accepted, and its leased samples go back. The machine can only come back with a new
    token and under a new name.
    """
    from ciuic.net.messages import Ok

    if not yes and not as_json and not typer.confirm(f"evict {node} for good?"):
        raise UsageError(f"{node} was not evicted", next="answer y, or give --yes")
    reply = operator_client().call("POST", f"{node_path(node)}/evict", None, Ok)
    if as_json:
        print_json(reply)
    else:
        print_line(f"{node} is evicted")


def node_path(node: str) -> str:
    """The API path of a node; the name is from a person, so it is quoted."""
    return f"/v1/nodes/{quote(node, safe='')}"


def fetch_nodes(client: "HubClient") -> "list[NodeInfo]":
    """All nodes of the hub, in order of joining."""
    from ciuic.net.messages import NodeInfo

    return client.call("GET", "/v1/nodes", None, list[NodeInfo])


def pick(nodes: "list[NodeInfo]", names: list[str]) -> "list[NodeInfo]":
    """Those with these names, in this order. Raises NotFoundError naming the known ones."""
    by_name = {node.node_id: node for node in nodes}
    if unknown := [name for name in names if name not in by_name]:
        known = ", ".join(by_name) or "none"
        raise NotFoundError(f"the hub has no node {unknown[0]!r}", next=f"one of: {known}")
    return [by_name[name] for name in names]
