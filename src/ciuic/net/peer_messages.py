"""What nodes that may be dialled directly tell the hub, and what it tells others of them."""

from typing import Literal

import msgspec

MAX_HELD = 256
"""Snapshots that a node tells of."""
MAX_LINKS = 256
PEER_SNAPSHOT = "/v1/peer/snapshot"


class PeerMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of these messages."""


class HeldSnapshot(PeerMessage):
    """A snapshot in a node's copy of a ledger."""

    run_id: str
    fragment: int
    version: int
    content: str
    """Names what is in the file (ledger.content)."""


class PeerOffer(PeerMessage):
    """Where a node may be dialled, and what it holds."""

    url: str
    """`https://name:port`; the name is in its certificate."""
    held: list[HeldSnapshot] = []


class PeerLink(PeerMessage):
    """A direct connection, as measured by the node that dialled."""

    up_bits_per_s: float
    down_bits_per_s: float
    rtt_s: float
    age_s: float = 0.0
    """Since it was measured, when this was told."""


class SourceOutcome(PeerMessage):
    """What came from one source."""

    url: str
    taken_bytes: int = 0
    problem: Literal["", "wrong", "away"] = ""
    """wrong: it sent other bytes; away: it did not answer, or not to the end."""
    detail: str = ""
