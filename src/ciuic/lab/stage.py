"""The demo's stage: one hub, one relay and one agent per site, all on this machine."""

import contextlib
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ciuic.errors import RunFailedError, UnreachableError
from ciuic.lab.crew import Crew
from ciuic.lab.profiles import Profile
from ciuic.lab.relay import LinkRelay, RelayStats
from ciuic.net.client import HubClient
from ciuic.net.messages import CreateTokenReply, CreateTokenRequest, NodeInfo
from ciuic.net.tls import write_private_file

HUB_START_S = 60.0
MEASURE_S = 8.0
STOP_S = 10.0
_HUB = "hub"


class Stage:
    """Processes and relays. Leaving the `with` block ends them all."""

    def __init__(self, profile: Profile, folder: Path, *, seed: int) -> None:
        self.profile = profile
        self._state = folder / "state"
        self._crew = Crew(folder / "logs")
        self._seed = seed
        self._relays: dict[str, LinkRelay] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._crew)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def hub_home(self) -> Path:
        """CIUIC_HOME of the hub and its operator."""
        return self._state / "hub"

    def set_up(self) -> HubClient:
        """Start everything; a client with the operator's certificate. Raises RunFailedError."""
        client = self._start_hub()
        self._stack.callback(client.close)
        for number, site in enumerate(self.profile.sites):
            relay = LinkRelay(site.link, ("127.0.0.1", client.address.port), seed=100 * self._seed + number)
            self._relays[site.location] = self._stack.enter_context(relay)
        request = CreateTokenRequest(lifetime_s=3600, uses=len(self.profile.sites))
        token = client.call("POST", "/v1/tokens", request, CreateTokenReply).token
        write_private_file(self._token_file, token.encode())
        for site in self.profile.sites:
            self.start_node(site.location)
        return client

    def wait_until_measured(self, client: HubClient) -> dict[str, dict[str, float]]:
        """What the nodes measure of their links before training takes the cores, by node id; waits a moment for it."""
        deadline = time.monotonic() + MEASURE_S
        measured: dict[str, dict[str, float]] = {}
        while time.monotonic() < deadline and len(measured) < len(self.profile.sites):
            time.sleep(0.1)
            self.check()
            nodes = client.call("GET", "/v1/nodes", None, list[NodeInfo])
            measured = {node.node_id: node.measured for node in nodes if "rtt_s" in node.measured}
        return measured

    def start_node(self, location: str) -> None:
        """Start an agent; one that was here before comes back as the node it was."""
        site = self.profile.site(location)
        host, port = self._relays[location].address
        arguments = ["node", "join", f"https://{host}:{port}", "--location", location]
        arguments += ["--home", str(self._state / "nodes" / location), "--token-file", str(self._token_file)]
        for name, value in site.claimed.items():
            arguments += ["--claim", f"{name}={value:g}"]
        self._crew.start(location, arguments, {"OMP_NUM_THREADS": "1"})

    def kill_node(self, location: str) -> None:
        """kill -9 of the agent, its worker and whatever they started."""
        self._crew.kill(location)

    def check(self) -> None:
        """Raises RunFailedError when a process has ended by itself."""
        self._crew.check()

    def relay_stats(self) -> dict[str, RelayStats]:
        """By location."""
        return {location: relay.stats() for location, relay in self._relays.items()}

    def dismiss_nodes(self) -> None:
        """Let the agents leave."""
        self._crew.stop(self.profile.locations, STOP_S)

    def dismiss_hub(self) -> None:
        """Let the hub close its files."""
        self._crew.stop([_HUB], STOP_S)

    @property
    def _token_file(self) -> Path:
        return self._state / "token"

    def _start_hub(self) -> HubClient:
        arguments = ["hub", "start", "--home", str(self.hub_home), "--host", "127.0.0.1", "--port", "0"]
        hub = self._crew.start(_HUB, arguments, {})
        deadline = time.monotonic() + HUB_START_S
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(FileNotFoundError, UnreachableError):  # not there yet
                client = operator_client(self.hub_home)
                client.call("GET", "/v1/nodes", None, list[NodeInfo])
                return client
            time.sleep(0.1)
        raise RunFailedError("the demo's hub does not answer", next=f"read {hub.log}")


def operator_client(hub_home: Path) -> HubClient:
    """A client with the certificate that the hub made for its local operator. Raises FileNotFoundError before that."""
    folder = hub_home / "operator"
    profile = json.loads((folder / "profile.json").read_bytes())
    authority = (folder / profile["authority"]).read_bytes()
    return HubClient(profile["url"], authority, folder / profile["cert"], folder / profile["key"])
