"""A real hub, an agent that other nodes may dial and that holds a snapshot, and a run into which a node comes late."""

from pathlib import Path
from shutil import copyfile

from hub_process import HubProcess, NodeOnWire, eventually
from hub_worker import WireWorker
from net_processes import AgentProcess

from ciuic.ledger.layout import Tensor, make_layout
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.peer_messages import SourceOutcome
from ciuic.net.tls import Purpose


class LargeWorker(WireWorker):
    """A model of 8 MiB."""

    def __init__(self, node: NodeOnWire, run_id: str) -> None:
        super().__init__(node, run_id)
        matrix = Tensor(name="matrix", shape=(2048, 1024), dtype="float32", section="coded", row_aligned=True)
        self.layout = make_layout([matrix], 1)
        self.count = self.layout.fragment_shape(0).element_count


class PeerWorld:
    """`holder` is the process of node us-west, which works for no run; `run_id` has a base at version 0."""

    def __init__(self, hub: HubProcess, folder: Path, first: NodeOnWire) -> None:
        self.hub, self.folder = hub, folder
        nodes = {"min": 1, "locations": ["first", "late"]}
        sync = {"interval": 1, "compression": {"up": "none", "down": "1-bit"}}
        self.run_id = hub.submit({"nodes": nodes, "train": {"samples": 1000}, "sync": sync})
        eventually(lambda: hub.run(self.run_id).state == "running")
        LargeWorker(first, self.run_id).attach()
        self.held = folder / f"node/nodes/us-west/runs/{self.run_id}/ledger/0001/fragment-0/0000000000.base"
        self.held.parent.mkdir(parents=True)
        copyfile(self.snapshot, self.held)
        self.holder = AgentProcess(hub, folder / "node", token=hub.token(), direct=["127.0.0.1", 0], settle_s=0.0)

    @property
    def snapshot(self) -> Path:
        """The hub's own file."""
        return self.hub.home / "hub" / "runs" / self.run_id / "fragment-0" / "snapshots" / "0000000000.base"

    def url(self) -> str:
        """Where the holder is dialled, once the hub knows."""

        def told() -> str:
            found = self.hub.nodes().get("us-west")
            return "" if found is None else found.direct_url

        return eventually(told, within_s=60.0)

    def offered(self, joiner: LargeWorker) -> m.FragmentState:
        """What the hub answers to a joiner, once it knows that the snapshot is held."""

        def told() -> m.FragmentState | None:
            reply = joiner.try_attach()
            return reply.fragments[0] if reply.state == "ready" and reply.fragments[0].sources else None

        self.url()
        return eventually(told, within_s=60.0)

    def fetch(self, joiner: LargeWorker, state: m.FragmentState) -> SourceOutcome:
        """The snapshot as a joiner gets it, checked; how it went with the holder, of which the hub is told, too."""
        file = self.folder / "got"
        (outcome,) = joiner.client.download_snapshot(joiner.path, file, state, 0)
        assert file.read_bytes() == self.snapshot.read_bytes()
        report = m.SourcesReport(fragment=0, version=0, sources=[outcome])
        joiner.client.call("POST", f"{joiner.path}/sources", report, m.Ok)
        return outcome


def peer_client(hub: HubProcess, url: str, folder: Path | None, purpose: Purpose = "peer") -> HubClient:
    """A connection to a node; without a folder without a certificate."""
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    name = "operator" if folder is not None and folder.name == "operator" else "node"
    cert, key = (None, None) if folder is None else (folder / f"{name}.pem", folder / f"{name}.key")
    made = HubClient(url, authority, cert, key, purpose, 10.0)
    hub.clients.append(made)
    return made
