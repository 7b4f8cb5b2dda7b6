"""What a ledger tells of its rounds, in one sentence each: (text, node, data) of an event."""

from typing import Any

from ciuic.hub.run.fragment_rounds import Closed
from ciuic.net.messages import RoundInfo
from ciuic.units import format_bytes, format_duration

Line = tuple[str, str, dict[str, Any]]


def round_line(info: RoundInfo, without: str) -> Line:
    """A closed round: why it closed, whose pushes are in it, whom it did without."""
    name = f"round {info.version}" + (f" of fragment {info.fragment}" if info.fragment else "")
    text = f"{name} closed by {info.why}{without}: {', '.join(info.nodes)}; {info.tokens:,} tokens"
    late = [f"{node} ({s} behind)" for node, s in zip(info.nodes, info.staleness, strict=True) if s]
    text += f"; carried: {', '.join(late)}" if late else ""
    data = {"version": info.version, "fragment": info.fragment, "nodes": info.nodes, "why": info.why}
    return text, "", {**data, "without": without.removeprefix(" without ").partition(" (")[0]}


def without(closed: Closed) -> str:
    """Whom a round did without, and why; empty when nobody was missing."""
    if not closed.missing:
        return ""
    pushes = "its push was" if len(closed.missing) == 1 else "their pushes were"
    return f" without {', '.join(closed.missing)} ({pushes} not there after {format_duration(closed.waited_s)})"


def snapshot_line(fragment: int, closed: Closed) -> Line:
    """A snapshot was written: joiners and restarts begin there."""
    version = closed.header.version
    name = f"version {version}" + (f" of fragment {fragment}" if fragment else "")
    text = f"snapshot of {name} written ({format_bytes(closed.snapshot_bytes)})"
    return text, "", {"version": version, "fragment": fragment, "bytes": closed.snapshot_bytes}
