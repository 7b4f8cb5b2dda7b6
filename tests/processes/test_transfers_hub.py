"""Large pushes and snapshots through a real hub: bytes at the socket, a killed hub, what a joiner downloads."""

import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from examples import is_soak
from hub_process import Beating, HubProcess, NodeOnWire, eventually
from hub_worker import WireWorker
from msgspec.structs import replace

from ciuic.errors import UnreachableError
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.ledger.entry import Push, snapshot_from_frame
from ciuic.ledger.layout import Tensor, make_layout
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.net.sockets import tcp_facts
from ciuic.net.tls import Purpose

ROWS = 2048
MIB = 1024 * 1024
GIB_ROWS = 262_144 if is_soak() else 8_192
"""Of 4 KiB: 1 GiB in a soak, 32 MiB else."""


class LargeWorker(WireWorker):
    """A model of 8 MiB, pushed as it is; bodies go through `way`."""

    def __init__(self, node: NodeOnWire, run_id: str, way: HubClient, rows: int = ROWS) -> None:
        super().__init__(node, run_id)
        matrix = Tensor(name="matrix", shape=(rows, 1024), dtype="float32", section="coded", row_aligned=True)
        self.layout = make_layout([matrix], 1)
        self.count = self.layout.fragment_shape(0).element_count
        self.way = way

    def send(self, push):  # type: ignore[no-untyped-def]
        return self.way.push(self.path, push.to_frame(), 0)


def through(node: NodeOnWire, relay: LinkRelay, purpose: Purpose = "updates") -> HubClient:
    authority = (node.hub.home / "operator" / "authority.pem").read_bytes()
    url = f"https://{relay.address[0]}:{relay.address[1]}"
    made = HubClient(url, authority, node.folder / "node.pem", node.folder / "node.key", purpose)
    node.hub.clients.append(made)
    return made


def relay_to(hub: HubProcess, bits_per_s: float) -> LinkRelay:
    parts = urlsplit(hub.url)
    link = Link(name="x", up_bits_per_s=bits_per_s, down_bits_per_s=bits_per_s, one_way_delay_s=0.0)
    return LinkRelay(link, (str(parts.hostname), int(parts.port or 0)))


def started(hub: HubProcess, node: NodeOnWire, relay: LinkRelay, *, rows: int = ROWS) -> LargeWorker:
    sync = {"interval": 1, "compression": {"up": "none", "down": "1-bit"}}
    run_id = hub.submit({"nodes": {"min": 1}, "train": {"samples": 1000}, "sync": sync})
    worker = LargeWorker(node, run_id, through(node, relay), rows)
    eventually(lambda: hub.run(run_id).state == "running")
    worker.attach()
    worker.machine.use("none")
    return worker


def test_a_large_push_costs_at_most_one_percent_more_than_its_bytes(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node), relay_to(hub, 1e9) as relay:
            worker = started(hub, node, relay)
            worker.train(worker.lease())
            before = relay.stats().up_by_purpose["updates"]
            assert worker.push().status == "accepted"
            sent = relay.stats().up_by_purpose["updates"] - before
            eventually(lambda: worker.pull(wait_s=1.0))
    assert 4 * worker.count < sent < 1.01 * 4 * worker.count


@pytest.mark.timeout(1800)
def test_a_payload_of_1_gib_arrives_whole_and_hub_and_node_have_the_same_base(tmp_path: Path) -> None:
    """And the entry goes out again as large as the push came in."""
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node):
            sync = {"interval": 1, "compression": {"up": "none", "down": "none"}}
            run_id = hub.submit({"nodes": {"min": 1}, "train": {"samples": 1000}, "sync": sync})
            worker = LargeWorker(node, run_id, node.connect(), GIB_ROWS)
            eventually(lambda: hub.run(run_id).state == "running")
            worker.attach()
            worker.machine.use("none")
            worker.train(worker.lease(1))
            assert worker.push().status == "accepted"
            assert worker.last_push is not None
            assert len(worker.last_push.payload) == 4096 * GIB_ROWS
            eventually(lambda: worker.pull(wait_s=10.0), within_s=600)
            assert (worker.version, worker.machine.replicas[0].in_flight) == (1, None)
            assert worker.digest == hub.run(run_id).digests[0]
            assert len(worker.lease(1).ranges) == 1, "and it goes on"


def test_a_hub_killed_in_the_middle_of_a_push_gets_the_rest(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node), relay_to(hub, 1e9) as relay:
            worker = started(hub, node, relay)
            worker.train(worker.lease())
            relay.set_rate(40e6, 40e6)
            spool = hub.home / "hub" / "spool"

            def kill() -> None:
                eventually(lambda: [p for p in spool.glob("*/*") if p.stat().st_blocks * 512 > 2 * MIB])
                hub.kill()
                relay.set_rate(1e9, 1e9)
                hub.start()

            killer = threading.Thread(target=kill)
            killer.start()
            worker.last_push = push = worker.machine.push(0, worker.theta)

            def deliver() -> m.PushReply | None:
                try:
                    return worker.send(push)
                except UnreachableError:
                    return None

            assert deliver() is None, "the hub was away"
            killer.join(60)
            between = relay.stats().up_by_purpose["updates"]
            reply = eventually(deliver, within_s=30.0)
            sent = relay.stats().up_by_purpose["updates"] - between
            assert reply.status == "accepted"
            assert sent < 4 * worker.count - MIB, "what had arrived before is not sent again"
            eventually(lambda: worker.pull(wait_s=1.0))


def test_a_push_that_was_accepted_outlives_a_kill_of_the_hub_in_the_next_moment(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node), relay_to(hub, 1e9) as relay:
            worker = started(hub, node, relay)
            worker.train(worker.lease())
            assert worker.push().status == "accepted"
            hub.kill()
            assert not list((hub.home / "hub" / "spool").glob("*/*")), "the spooled file is the push's now"
            hub.start()
            push = worker.last_push
            assert push is not None
            assert eventually(lambda: _sent(worker, push)).status == "duplicate"
            eventually(lambda: worker.pull(wait_s=1.0))
            assert worker.machine.replicas[0].in_flight is None


def test_a_first_small_push_goes_over_all_connections_that_are_open_and_the_next_over_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciuic.net.client.FAR_S", 0.0)
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node), relay_to(hub, 1e9) as relay:
            worker = started(hub, node, relay, rows=128)
            worker.way.open(lanes=4)
            sent = []
            for _ in range(2):
                worker.train(worker.lease())
                assert worker.push().status == "accepted"
                worker.settle()
                facts = [tcp_facts(lane.sock) for lane in worker.way.fan.lanes(4) if lane.sock is not None]
                sent.append([each.sent_bytes for each in facts if each is not None])
    first, second = sent
    assert len(first) == 4
    assert sum(first) > 4 * worker.count, "4 bytes per element"
    assert second == first


def _sent(worker: LargeWorker, push: Push) -> m.PushReply | None:
    try:
        return worker.send(push)
    except UnreachableError:
        return None


def test_a_joiner_gets_the_snapshot_in_parts_and_checked(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as hub:
        node = hub.join("us")
        with Beating(node), relay_to(hub, 1e9) as relay:
            worker = started(hub, node, relay)
            state = worker.try_attach().fragments[0]
            file = tmp_path / "snapshot"
            state = replace(state, sources=["https://127.0.0.1:1"], content="0" * 32)
            (gone,) = through(node, relay, "snapshots").download_snapshot(worker.path, file, state, 0)
            assert (gone.taken_bytes, gone.problem) == (0, "away")
            snapshot = snapshot_from_frame(file.read_bytes(), worker.count)
            assert snapshot.header.digest == state.digest
            assert relay.stats().down_by_purpose["snapshots"] > state.snapshot_bytes
