"""Asking nodes to measure themselves, and waiting for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from ciuic.errors import CheckFailedError, ConflictError, NotFoundError
from ciuic.net.client import HubClient
from ciuic.net.messages import MeasureReply, NodeInfo

POLL_S = 0.5
JITTER_S = 0.3
"""The time of the same measurement moves so little from heartbeat to heartbeat; measuring everything takes longer."""
ABSENT = ("left", "dead", "evicted", "suspect")


@dataclass(kw_only=True)
class Outcome:
    """How it went."""

    nodes: list[NodeInfo] = field(default_factory=list)
    """The nodes asked for, as they are known at the end."""
    remarks: list[str] = field(default_factory=list)
    """What is not as wished."""
    missing: list[str] = field(default_factory=list)
    """Nodes that were not measured."""

    @property
    def exit_code(self) -> int:
        """0, or that of a check that failed."""
        return CheckFailedError.exit_code if self.missing else 0


def measure_nodes(
    client: HubClient,
    names: list[str],
    *,
    limit_s: float,
    together: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Ask these nodes (all that are here, when none are named) and wait at most `limit_s` for each.

    One after the other, since they share the hub's link; or `together`. Raises NotFoundError for an unknown name,
    ConflictError when nobody is there.
    """
    known = _nodes(client)
    if unknown := [name for name in names if name not in known]:
        raise NotFoundError(f"the hub has no node {unknown[0]!r}", next=f"one of: {', '.join(known) or 'none'}")
    wanted = names or [name for name, node in known.items() if node.state not in ABSENT]
    if not wanted:
        raise ConflictError("no node is here to be measured", next="start agents with: ciuic node join")
    outcome = Outcome()
    for group in [wanted] if together else [[name] for name in wanted]:
        say(f"measuring {', '.join(group)}")
        before = {name: known[name].measured_at or 0.0 for name in group}
        tickets = _ask(client, group, outcome)
        known = _wait(client, tickets, limit_s)
        for name, ticket in tickets.items():
            _judge(known[name], ticket, before[name], limit_s, outcome)
    outcome.nodes = [known[name] for name in wanted]
    return outcome


def _judge(node: NodeInfo, ticket: int, before: float, limit_s: float, outcome: Outcome) -> None:
    if node.measure_ticket != ticket:
        outcome.missing.append(node.node_id)
        outcome.remarks.append(f"{node.node_id} has not answered within {limit_s:.0f} s")
    elif (node.measured_at or 0.0) < before + JITTER_S:
        outcome.remarks.append(f"{node.node_id} works: only its round trip and what is free were measured now")


def _ask(client: HubClient, names: list[str], outcome: Outcome) -> dict[str, int]:
    tickets = {}
    for name in names:
        try:
            path = f"/v1/nodes/{quote(name, safe='')}/measure"
            tickets[name] = client.call("POST", path, None, MeasureReply).ticket
        except ConflictError as error:
            outcome.missing.append(name)
            outcome.remarks.append(f"{error.message}: {error.cause}")
    return tickets


def _wait(client: HubClient, tickets: dict[str, int], limit_s: float) -> dict[str, NodeInfo]:
    until = time.monotonic() + limit_s
    while True:
        known = _nodes(client)
        open_ones = [name for name, ticket in tickets.items() if known[name].measure_ticket != ticket]
        if not open_ones or time.monotonic() >= until:
            return known
        time.sleep(POLL_S)


def _nodes(client: HubClient) -> dict[str, NodeInfo]:
    return {node.node_id: node for node in client.call("GET", "/v1/nodes", None, list[NodeInfo])}
