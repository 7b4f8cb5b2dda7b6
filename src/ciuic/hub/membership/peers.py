"""Nodes that others may dial directly: where, what they hold, what was measured between them. In memory, thread-safe.

Everything here is told again with each heartbeat, so nothing is stored. What one node says about itself counts for no
more than advice: who dials checks the certificate, and what comes is checked against the hub's own list of chunks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ciuic.errors import CiuicError, ProtocolError
from ciuic.ledger.content import CONTENT
from ciuic.net.messages import HeartbeatRequest, NodeInfo
from ciuic.net.peer_messages import MAX_HELD, MAX_LINKS, PeerLink, SourceOutcome
from ciuic.net.url import parse_hub_url

MAX_URL, MAX_NAME = 300, 64
MAX_OUTCOMES = 16
MOST_SOURCES = 4
"""Nodes that a joiner is sent to for one snapshot."""


@dataclass(kw_only=True)
class _Peer:
    url: str = ""
    held: frozenset[str] = frozenset()
    links: dict[str, PeerLink] = field(default_factory=dict)
    told_s: float = 0.0


class Peers:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._avoided: set[tuple[str, str]] = set()
        """(who got other bytes, whose they were)."""
        self._served: dict[str, int] = {}

    def told(self, node: str, request: HeartbeatRequest, names: Sequence[str]) -> None:
        """A heartbeat. `names`: for which the node has a certificate; under others it is not offered to anybody."""
        peer = _Peer(links=dict(request.links), told_s=self._clock())
        offer = request.offer
        if offer is not None and parse_hub_url(offer.url).host in {name.lower() for name in names}:
            peer.url, peer.held = offer.url, frozenset(one.content for one in offer.held)
        with self._lock:
            self._peers[node] = peer

    def holders(self, content: str, *, joiner: str, is_here: Callable[[str], bool]) -> list[str]:
        """Where a joiner may take this snapshot from: those that were asked least come first."""
        with self._lock:
            found = [
                name
                for name, peer in self._peers.items()
                if peer.url and content in peer.held and name != joiner and (joiner, name) not in self._avoided
            ]
            chosen = sorted(filter(is_here, found), key=lambda name: self._served.get(name, 0))[:MOST_SOURCES]
            for name in chosen:
                self._served[name] = self._served.get(name, 0) + 1
            return [self._peers[name].url for name in chosen]

    def others(self, node: str, is_here: Callable[[str], bool]) -> dict[str, str]:
        """All nodes but this one that may be dialled, and where."""
        with self._lock:
            known = {name: peer.url for name, peer in self._peers.items() if peer.url and name != node}
        return {name: url for name, url in sorted(known.items())[:MAX_LINKS] if is_here(name)}

    def name_of(self, url: str) -> str:
        """Who is dialled there; empty: nobody that is known."""
        with self._lock:
            return next((name for name, peer in self._peers.items() if url and peer.url == url), "")

    def avoid(self, joiner: str, node: str) -> None:
        """This joiner is not sent to that node again."""
        with self._lock:
            self._avoided.add((joiner, node))

    def shown(self, info: NodeInfo) -> NodeInfo:
        """With what is known of its direct connections."""
        with self._lock:
            peer = self._peers.get(info.node_id)
            if peer is None:
                return info
            since_s = self._clock() - peer.told_s
            links = {name: replace(link, age_s=link.age_s + since_s) for name, link in peer.links.items()}
            return replace(info, direct_url=peer.url, links=links)


def check_offer(request: HeartbeatRequest) -> None:
    """What a heartbeat says about direct connections. Raises ProtocolError."""
    links, offer = request.links, request.offer
    if len(links) > MAX_LINKS or any(len(name) > MAX_NAME or not _is_link(x) for name, x in links.items()):
        raise ProtocolError("the measured direct connections of this node cannot be")
    if offer is None:
        return
    try:
        url = parse_hub_url(offer.url[:MAX_URL])
    except CiuicError as error:
        raise ProtocolError("the address of this node cannot be", cause=error.message) from error
    sane = len(offer.url) <= MAX_URL and url.port > 0 and len(offer.held) <= MAX_HELD
    if not sane or not all(CONTENT.fullmatch(one.content) for one in offer.held):
        raise ProtocolError("what this node offers to others cannot be", next="use the same version on both sides")


def check_outcomes(outcomes: Sequence[SourceOutcome]) -> None:
    """Raises ProtocolError."""
    if len(outcomes) > MAX_OUTCOMES or any(len(x.url) > MAX_URL or not 0 <= x.taken_bytes < 1 << 50 for x in outcomes):
        raise ProtocolError("this report about sources cannot be")


def _is_link(link: PeerLink) -> bool:
    values = (link.up_bits_per_s, link.down_bits_per_s, link.rtt_s, link.age_s)
    return all(0 <= value < 1e15 for value in values)
