"""Bytes of pushes and entries, counted at the socket: within 1 % of the formula, TLS, HTTP and headers included."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hub_process import Beating, HubProcess, NodeOnWire, eventually
from hub_worker import WireWorker

from ciuic.codec import FragmentCodec
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.ledger.layout import Layout, Tensor, make_layout
from ciuic.net.client import HubClient

ROUNDS = 4
COUNT = 1 << 22


def wide_layout() -> Layout:
    rows = COUNT // 4096
    matrix = Tensor(name="matrix", shape=(rows, 4096), dtype="float32", section="coded", row_aligned=True)
    return make_layout([matrix, Tensor(name="norm", shape=(64,), dtype="float32", section="small")], 1)


class RelayedWorker(WireWorker):
    """Pushes and pulls go through a relay that counts; the rest goes to the hub itself."""

    def __init__(self, node: NodeOnWire, run_id: str, relay: LinkRelay) -> None:
        super().__init__(node, run_id)
        self.layout = wide_layout()
        self.count = self.layout.fragment_shape(0).element_count
        authority = (node.hub.home / "operator" / "authority.pem").read_bytes()
        host, port = relay.address
        cert, key = node.folder / "node.pem", node.folder / "node.key"
        self.updates = HubClient(f"https://{host}:{port}", authority, cert, key, "updates")
        node.hub.clients.append(self.updates)

    def round_trip(self) -> None:
        self.train(self.lease())
        direct, self.client = self.client, self.updates
        try:
            assert self.push().status == "accepted"
            eventually(lambda: self.pull(wait_s=1.0))
        finally:
            self.client = direct


@pytest.mark.parametrize(("up", "down"), [("1-bit", "1-bit"), ("2-bit", "int4"), ("topk", "int8")])
def test_bits_per_parameter_at_the_socket_are_those_of_the_formula(tmp_path: Path, up: str, down: str) -> None:
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us-west")
        run_id = hub.submit(
            {
                "nodes": {"min": 1},
                "train": {"samples": 1000},
                "sync": {"interval": 1, "compression": {"up": up, "down": down}},
            }
        )
        parts = urlsplit(hub.url)
        link = Link(name="fast", up_bits_per_s=1e9, down_bits_per_s=1e9, one_way_delay_s=0.0, jitter_s=0.0)
        with Beating(node), LinkRelay(link, (str(parts.hostname), int(parts.port or 0))) as relay:
            worker = RelayedWorker(node, run_id, relay)
            eventually(lambda: hub.run(run_id).state == "running")
            worker.attach()
            worker.machine.use(up)
            worker.round_trip()
            before = relay.stats()
            for _ in range(ROUNDS):
                worker.round_trip()
            after = relay.stats()
    shape = wide_layout().fragment_shape(0)
    for name, counted in (
        (up, after.up_by_purpose["updates"] - before.up_by_purpose["updates"]),
        (down, after.down_by_purpose["updates"] - before.down_by_purpose["updates"]),
    ):
        formula = ROUNDS * FragmentCodec(name, shape).payload_bytes
        assert formula < counted < 1.01 * formula, f"{name}: {8 * counted / ROUNDS / COUNT:.4f} bits per parameter"
