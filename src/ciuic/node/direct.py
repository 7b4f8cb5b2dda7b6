"""This node's side of direct connections: it listens, offers what it holds, and measures the way to others."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ciuic.errors import CiuicError
from ciuic.net.client import HubClient
from ciuic.net.names import plain_name
from ciuic.net.peer_messages import MAX_LINKS, PeerLink, PeerOffer
from ciuic.net.probe import measure_rate, measure_round_trips, receive, send
from ciuic.net.url import HubAddress
from ciuic.node.config import AgentConfig
from ciuic.node.identity import NodeIdentity
from ciuic.node.peer_server import PeerServer
from ciuic.node.shelf import SnapshotShelf

PROBE_TIMEOUT_S = 5.0
LOOK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class Direct:
    """Everything about other nodes that the agent tells and hears. `offer` and `links` are for the heartbeat."""

    def __init__(self, config: AgentConfig, identity: NodeIdentity, *, is_busy: Callable[[], bool]) -> None:
        self._config, self._identity, self._is_busy = config, identity, is_busy
        self._shelf = SnapshotShelf(identity.folder / "runs")
        self._server: PeerServer | None = None
        self._lock = threading.Lock()
        self._links: dict[str, tuple[PeerLink, float]] = {}
        self._offer: PeerOffer | None = None
        self._look_at_s = 0.0
        self._is_told = False

    def open(self) -> None:
        """Listen, where the node's owner wants that; what fails is told once and tried again with the next call."""
        if self._config.direct is None or self._server is not None:
            return
        try:
            server = PeerServer(self._config.direct, self._identity, path_of=self._shelf.path_of, is_busy=self._is_busy)
        except (OSError, CiuicError) as error:
            if not self._is_told:
                _log.warning("no direct connections: cannot listen on %s:%d: %s", *self._config.direct, error)
            self._is_told = True
            return
        self._server = server
        threading.Thread(target=server.serve_forever, name="ciuic-direct", daemon=True).start()
        _log.info("other nodes may dial this one at %s", self.url)

    @property
    def url(self) -> str:
        """Where others dial; empty while nothing listens."""
        if self._server is None:
            return ""
        name = plain_name(self._config.direct_names[0]).lower()
        return HubAddress(host=name, port=self._server.server_address[1]).url

    def offer(self) -> PeerOffer | None:
        """What others may have from here; None while nothing listens."""
        if self._server is None:
            return None
        if self._offer is None or time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_EVERY_S
            self._offer = PeerOffer(url=self.url, held=self._shelf.held())
        return self._offer

    def refuse(self, serials: list[str]) -> None:
        """Certificates that the hub has revoked."""
        if self._server is not None:
            self._server.revoked = frozenset(serials)

    def links(self) -> dict[str, PeerLink]:
        """What was measured, by node."""
        now_s = time.monotonic()
        with self._lock:
            return {name: replace(link, age_s=now_s - at_s) for name, (link, at_s) in self._links.items()}

    def measure(self, peers: Mapping[str, str], may_go_on: Callable[[], bool]) -> None:
        """Dial these nodes one after the other; who does not answer has no link any more."""
        for name, url in list(peers.items())[:MAX_LINKS]:
            if not may_go_on():
                return
            try:
                link: PeerLink | None = self._measured(url)
            except CiuicError as error:
                _log.info("there is no direct way to %s: %s (%s)", name, error.message, error.cause)
                link = None
            with self._lock:
                self._links.pop(name, None)
                if link is not None:
                    self._links[name] = link, time.monotonic()

    def _measured(self, url: str) -> PeerLink:
        identity = self._identity
        authority_pem = identity.authority.read_bytes()
        client = HubClient(url, authority_pem, identity.cert, identity.key, "peer", PROBE_TIMEOUT_S)
        try:
            round_trips, _ = measure_round_trips(client)
            rtt_s = min(round_trips)
            up = measure_rate(lambda count: send(client, count), rtt_s)
            down = measure_rate(lambda count: receive(client, count), rtt_s)
        finally:
            client.close()
        return PeerLink(up_bits_per_s=up, down_bits_per_s=down, rtt_s=rtt_s)

    def close(self) -> None:
        """Nobody is served any more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.socket.close()
