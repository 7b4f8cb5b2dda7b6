"""Tables and lines about nodes: claimed beside measured. Nothing here prints."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ciuic.cli.output import Grid
from ciuic.net.measured import QUANTITIES, claimed_value
from ciuic.net.messages import NodeInfo
from ciuic.units import format_duration, format_rate

NO_NODES = "no nodes yet: make a token with `ciuic hub token create`, then `ciuic node join` on each machine"
GONE = ("left", "dead", "evicted")
DIRECT = "direct, measured"


def nodes_grid(nodes: Iterable[NodeInfo], now: float) -> Grid:
    """All nodes of a network: what they claim beside what was measured. `now`: seconds since 1970."""
    columns = ("node", "state", "run", "claimed", "up", "down", "round trip", "gpus", "measured ago", "seen ago")
    rows = [_node_row(node, now) for node in nodes]
    return Grid(columns=columns, rows=rows, empty=NO_NODES, minor=("claimed", "gpus"))


def _node_row(node: NodeInfo, now: float) -> tuple[str, ...]:
    return (
        node.node_id if node.node_id == node.location else f"{node.node_id} ({node.location})",
        node.state,
        node.run_id or "-",
        ", ".join(f"{key} {value:g}" for key, value in sorted(node.claimed.items())) or "-",
        shown(node, "up_bits_per_s"),
        shown(node, "down_bits_per_s"),
        shown(node, "rtt_s"),
        shown(node, "gpu_count"),
        measured_ago(node, now).removesuffix(" ago"),
        last_seen(node).removesuffix(" ago"),
    )


def measured_grid(nodes: Iterable[NodeInfo], now: float) -> Grid:
    """What `ciuic nodes measure` found."""
    columns = ("node", "up", "down", "streams", "round trip", "resent", "processors", "gpus", "disk", "measured")
    rows = [_measured_row(node, now) for node in nodes]
    return Grid(columns=columns, rows=rows, empty=NO_NODES, minor=("measured",))


def _measured_row(node: NodeInfo, now: float) -> tuple[str, ...]:
    streams = [shown(node, name) for name in ("up_streams", "down_streams")]
    return (
        node.node_id,
        shown(node, "up_bits_per_s"),
        shown(node, "down_bits_per_s"),
        "-" if streams == ["-", "-"] else "/".join(streams),
        shown(node, "rtt_s"),
        shown(node, "loss_share"),
        shown(node, "cpu_flops"),
        shown(node, "gpu_flops"),
        shown(node, "disk_write_bytes_per_s"),
        measured_ago(node, now),
    )


def node_facts(node: NodeInfo, now: float) -> list[tuple[str, str]]:
    """One node in a few lines."""
    facts = [
        ("node", node.node_id),
        ("location", node.location),
        ("state", node.state),
        ("run", node.run_id or "-"),
        ("worker", f"{node.worker.state} {node.worker.detail}".strip()),
        ("last seen", last_seen(node)),
        ("links and speeds measured", measured_ago(node, now)),
        ("other nodes dial", node.direct_url or "not at all"),
        ("code from jobs", "allowed" if node.allow_code else "refused"),
    ]
    return [*facts, *sorted(node.facts.items())]


def quantities_grid(node: NodeInfo) -> Grid:
    """Everything measured or claimed of a node, side by side."""
    rows = []
    used: set[str] = set()
    for name, quantity in QUANTITIES.items():
        claim = claimed_value(name, node.claimed)
        if claim is None and name not in node.measured:
            continue
        used |= quantity.claims.keys() & node.claimed.keys()
        share = f"{node.measured[name] / claim:.0%}" if claim and name in node.measured else ""
        rows.append((quantity.what, "-" if claim is None else quantity.show(claim), shown(node, name), share))
    rows += [(name, f"{node.claimed[name]:g}", "-", "") for name in sorted(node.claimed.keys() - used)]
    rows += [(name, "-", f"{node.measured[name]:g}", "") for name in sorted(node.measured.keys() - QUANTITIES.keys())]
    return Grid(
        columns=("", "claimed", "measured", "of the claim"), rows=rows, empty="nothing is claimed or measured yet"
    )


def shown(node: NodeInfo, name: str) -> str:
    """A measured value for people; `-` when it is not known."""
    value = node.measured.get(name)
    return "-" if value is None else QUANTITIES[name].show(value)


def measured_ago(node: NodeInfo, now: float) -> str:
    """How old the measurements of links and speeds are."""
    return "never" if node.measured_at is None else f"{format_duration(max(0.0, now - node.measured_at))} ago"


def last_seen(node: NodeInfo) -> str:
    """When the node's heartbeat came last."""
    return "not since the hub started" if node.last_seen_s is None else f"{format_duration(node.last_seen_s)} ago"


# ---- from node to node ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeLink:
    """The way from one node to another: a direct connection that was measured, or through the hub."""

    source: str
    target: str
    bits_per_s: float
    """Through the hub: the slower of the source's way up and the target's way down."""
    rtt_s: float
    """Through the hub: both round trips together."""
    way: str = "through the hub"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def links_between(nodes: Iterable[NodeInfo]) -> list[NodeLink]:
    """All ordered pairs of nodes that are measured and not gone."""
    known = [
        node
        for node in nodes
        if node.state not in GONE and {"up_bits_per_s", "down_bits_per_s", "rtt_s"} <= node.measured.keys()
    ]
    return [_link(source, target) for source in known for target in known if source is not target]


def _link(source: NodeInfo, target: NodeInfo) -> NodeLink:
    """Either of the two may have dialled the other; what the source measured itself counts first."""
    name, other = source.node_id, target.node_id
    if other in source.links:
        found = source.links[other]
        return NodeLink(source=name, target=other, bits_per_s=found.up_bits_per_s, rtt_s=found.rtt_s, way=DIRECT)
    if name in target.links:
        found = target.links[name]
        return NodeLink(source=name, target=other, bits_per_s=found.down_bits_per_s, rtt_s=found.rtt_s, way=DIRECT)
    return NodeLink(
        source=name,
        target=other,
        bits_per_s=min(source.measured["up_bits_per_s"], target.measured["down_bits_per_s"]),
        rtt_s=source.measured["rtt_s"] + target.measured["rtt_s"],
    )


def links_grid(links: Sequence[NodeLink]) -> Grid:
    """One row per ordered pair."""
    rows = [
        (link.source, link.target, format_rate(link.bits_per_s), format_duration(link.rtt_s), link.way)
        for link in links
    ]
    columns = ("from", "to", "rate", "round trip", "way")
    return Grid(columns=columns, rows=rows, empty="fewer than two nodes are measured")
