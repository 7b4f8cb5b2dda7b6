"""Direct connections over real TLS: snapshots from a node, wrong bytes, a holder that dies, strangers, links."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_process import Beating, HubProcess, NodeOnWire, eventually
from msgspec.structs import replace
from net_processes import AgentProcess
from peer_world import LargeWorker, PeerWorld, peer_client

from ciuic.cli.measuring import measure_nodes
from ciuic.cli.node_views import DIRECT, links_between
from ciuic.errors import CertificateError, CiuicError, NotFoundError, OverloadedError, ProtocolError
from ciuic.lab.links import Link
from ciuic.lab.relay import LinkRelay
from ciuic.net.access_messages import AuditPage
from ciuic.net.client import HubClient
from ciuic.net.messages import Event, NodeInfo, Ok
from ciuic.net.peer_messages import PEER_SNAPSHOT
from ciuic.net.tls import certificate_names

MIB = 1 << 20


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "home") as hub:
        yield hub


@pytest.fixture
def late(hub: HubProcess) -> Iterator[NodeOnWire]:
    with Beating(node := hub.join("late")):
        yield node


@pytest.fixture
def world(hub: HubProcess, tmp_path: Path, late: NodeOnWire) -> Iterator[PeerWorld]:
    with Beating(first := hub.join("first")):
        made = PeerWorld(hub, tmp_path, first)
        yield made
        made.holder.close()


def told(hub: HubProcess, kind: str) -> list[Event]:
    return [event for event in hub.events() if event.kind == kind]


def test_a_joiner_takes_the_snapshot_from_a_node_that_holds_it(world: PeerWorld, late: NodeOnWire) -> None:
    joiner = LargeWorker(late, world.run_id)
    outcome = world.fetch(joiner, world.offered(joiner))
    assert outcome.problem == ""
    assert outcome.taken_bytes > MIB
    (event,) = told(world.hub, "snapshot.fetched")
    assert (event.node_id, event.data["from"], event.data["bytes"]) == ("late", "us-west", outcome.taken_bytes)
    eventually(lambda: "late took" in world.holder.said())


def test_a_node_that_holds_other_bytes_is_refused_and_not_offered_again(world: PeerWorld, late: NodeOnWire) -> None:
    joiner = LargeWorker(late, world.run_id)
    state = world.offered(joiner)
    with world.held.open("r+b") as file:  # every chunk; the two ends stay, so that it is offered as before
        for start in range(MIB // 2, state.snapshot_bytes - 1000, MIB // 2):
            file.seek(start)
            file.write(b"other")
    outcome = world.fetch(joiner, state)
    assert (outcome.problem, outcome.taken_bytes) == ("wrong", 0)
    (event,) = told(world.hub, "snapshot.refused")
    assert "us-west sent late other bytes" in event.text
    assert joiner.try_attach().fragments[0].sources == []


def test_a_holder_killed_in_the_middle_is_replaced_by_the_hub(world: PeerWorld, late: NodeOnWire) -> None:
    joiner = LargeWorker(late, world.run_id)
    state = world.offered(joiner)
    link = Link(name="slow", up_bits_per_s=20e6, down_bits_per_s=20e6, one_way_delay_s=0.0)
    with LinkRelay(link, ("127.0.0.1", int(state.sources[0].rsplit(":", 1)[1]))) as relay:
        state = replace(state, sources=[f"https://127.0.0.1:{relay.address[1]}"])

        def kill() -> None:
            eventually(lambda: relay.stats().down_bytes > MIB)
            world.holder.send(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcome = world.fetch(joiner, state)
        killer.join()
    assert outcome.problem == "away"
    assert outcome.taken_bytes < state.snapshot_bytes


def test_only_nodes_of_the_network_that_are_not_revoked_are_served(world: PeerWorld, late: NodeOnWire) -> None:
    hub, url = world.hub, world.url()
    path = f"{PEER_SNAPSHOT}/{world.offered(LargeWorker(late, world.run_id)).content}"
    with pytest.raises(CiuicError):
        peer_client(hub, url, None).fetch(path)
    with pytest.raises(CertificateError, match="is no node"):
        peer_client(hub, url, hub.home / "operator").fetch(path)
    client = peer_client(hub, url, late.folder)
    assert client.fetch(path) == world.snapshot.read_bytes()
    for wrong in (f"{PEER_SNAPSHOT}/{'0' * 32}", f"{PEER_SNAPSHOT}/../../node.key", "/v1/node/heartbeat"):
        with pytest.raises(NotFoundError):
            client.fetch(wrong)
    with pytest.raises(ProtocolError):
        client.fetch(f"/v1/node/probe?bytes={1 << 40}")
    hub.operator().call("POST", "/v1/nodes/late/evict", None, Ok)
    eventually(lambda: isinstance(refusal(client, path), CertificateError))


def refusal(client: HubClient, path: str) -> CiuicError | None:
    try:
        client.fetch(path)
    except CiuicError as error:
        return error
    return None


def test_a_third_caller_is_sent_away(world: PeerWorld, late: NodeOnWire) -> None:
    clients = [peer_client(world.hub, world.url(), late.folder) for _ in range(3)]
    assert [type(refusal(client, "/health")) for client in clients] == [type(None), type(None), OverloadedError]
    clients[0].close()
    eventually(lambda: refusal(clients[2], "/health") is None)


def test_a_node_cannot_play_the_hub(world: PeerWorld, late: NodeOnWire) -> None:
    with pytest.raises(CertificateError, match="not what was dialled"):
        peer_client(world.hub, world.url(), late.folder, "control").fetch("/health")


def test_a_node_that_offers_nothing_has_no_names_and_gets_them_by_renewal(hub: HubProcess, tmp_path: Path) -> None:
    agent = AgentProcess(hub, tmp_path / "node", token=hub.token(), settle_s=0.0)
    eventually(lambda: hub.nodes().get("us-west") and (agent.folder / "node.pem").exists())
    assert certificate_names((agent.folder / "node.pem").read_bytes()) == ()
    agent.close()
    agent = AgentProcess(hub, tmp_path / "node", direct=["127.0.0.1", 0], direct_name="localhost")
    try:
        url = eventually(lambda: hub.nodes()["us-west"].direct_url, within_s=60.0)
        assert url.startswith("https://localhost:")
        assert certificate_names((agent.folder / "node.pem").read_bytes()) == ("localhost",)
    finally:
        agent.close()
    lines = hub.operator().call("GET", "/v1/audit?after=0", None, AuditPage).lines
    assert any(line["action"] == "node.renew" and "localhost" in str(line["detail"]) for line in lines)


def test_measured_direct_links_are_in_the_matrix(hub: HubProcess, tmp_path: Path) -> None:
    agents = [
        AgentProcess(hub, tmp_path / name, token=hub.token(), location=name, settle_s=0.0, **options)
        for name, options in (("a", {"direct": ["127.0.0.1", 0]}), ("b", {}))
    ]
    try:
        eventually(lambda: "a" in hub.nodes() and hub.nodes()["a"].direct_url, within_s=60.0)
        eventually(lambda: all(is_measured(hub.nodes().get(name)) for name in "ab"), within_s=120.0)
        assert measure_nodes(hub.operator(), ["b"], limit_s=120.0).missing == []
        found = eventually(lambda: hub.nodes()["b"].links.get("a"), within_s=60.0)
        links = {(link.source, link.target): link for link in links_between(hub.nodes().values())}
        assert {link.way for link in links.values()} == {DIRECT}
        assert links["b", "a"].bits_per_s == found.up_bits_per_s
        assert links["a", "b"].bits_per_s == found.down_bits_per_s
    finally:
        for agent in agents:
            agent.close()


def is_measured(node: NodeInfo | None) -> bool:
    return node is not None and "up_bits_per_s" in node.measured
