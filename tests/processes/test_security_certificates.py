"""Certificates over time: renewed, revoked, the hub's own rotated while it runs. Real hub, real TLS, real agent."""

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hub_process import HubProcess, NodeOnWire, eventually
from security_world import ask, dial, until_closed
from shard_cluster import ShardCluster

from ciuic.errors import (
    CertificateError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    RoleError,
    TokenError,
    UnreachableError,
)
from ciuic.hub.access.gatekeeper import RENEWALS_AT_ONCE
from ciuic.net.access_messages import (
    CertificateInfo,
    CertificateReply,
    CertificateRequest,
    OperatorReply,
    OperatorRequest,
    RevokeReply,
    RevokeRequest,
    RotateReply,
    RotateRequest,
    TokenInfo,
)
from ciuic.net.client import HubClient
from ciuic.net.messages import HubInfo, NodeInfo, Ok, Role
from ciuic.net.shard_messages import ShardReply, ShardReport
from ciuic.net.tls import certificate_serial, check_issued, new_key_and_csr
from ciuic.net.tokens import parse_token
from ciuic.node.renewal import PENDING, finish_renewal


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One per test: what one does to certificates and connections is no business of the next."""
    with HubProcess(tmp_path_factory.mktemp("certificates") / "home") as running:
        yield running


def renewed(node: NodeOnWire) -> tuple[bytes, bytes]:
    """(certificate, key): asked for with the node's present certificate."""
    key, csr = new_key_and_csr()
    request = CertificateRequest(csr_pem=csr.decode())
    reply = node.client.call("POST", "/v1/node/renew", request, CertificateReply)
    return reply.certificate_pem.encode(), key


def take_up(node: NodeOnWire, pair: tuple[bytes, bytes]) -> None:
    (node.folder / "node.key").write_bytes(pair[1])
    (node.folder / "node.pem").write_bytes(pair[0])


def certificates(hub: HubProcess, name: str) -> list[CertificateInfo]:
    found = hub.operator().call("GET", "/v1/certificates", None, list[CertificateInfo])
    return [one for one in found if one.name == name]


def served_serial(hub: HubProcess) -> str:
    """Of the certificate that the hub shows in a new handshake."""
    with dial(hub) as stream:
        der = stream.getpeercert(binary_form=True)
    assert der is not None
    return certificate_serial(ssl.DER_cert_to_PEM_cert(der).encode())


def revoke(hub: HubProcess, name: str, role: Role | None = None) -> RevokeReply:
    request = RevokeRequest(name=name, role=role)
    return hub.operator().call("POST", "/v1/certificates/revoke", request, RevokeReply)


# ---- renewal -------------------------------------------------------------------------------------------------------


def test_a_renewed_certificate_is_for_the_same_name_and_the_old_one_holds_until_it_is_used(hub: HubProcess) -> None:
    node = hub.join("renews")
    node.beat()
    pair = renewed(node)
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    assert check_issued(pair[0], authority_pem=authority, key_pem=pair[1]).name == node.node_id
    node.beat()
    node.beat(client=node.connect())
    assert [one.state for one in certificates(hub, node.node_id)] == ["valid", "new"]
    old = node.connect()
    node.beat(client=old)
    take_up(node, pair)
    node.beat(client=node.connect())
    assert sorted(one.state for one in certificates(hub, node.node_id)) == ["replaced", "valid"]


def test_a_client_with_the_old_certificate_takes_up_the_new_file_by_itself(hub: HubProcess) -> None:
    node = hub.join("workers")
    node.beat()
    worker = node.connect()
    node.beat(client=worker)
    take_up(node, renewed(node))
    node.beat(client=node.connect())
    node.beat(client=worker)
    node.beat()


def test_a_replaced_certificate_is_refused_also_on_its_open_connection(hub: HubProcess) -> None:
    node = hub.join("stolen")
    with dial(hub, node) as thief:
        assert ask(thief, "GET", "/v1/node/probe?bytes=1")[0] == 200
        take_up(node, renewed(node))
        node.beat(client=node.connect())
        status, body = ask(thief, "GET", "/v1/node/probe?bytes=1")
    assert status == 401
    assert b"was renewed" in body


def test_a_renewal_whose_answer_was_lost_can_be_repeated(hub: HubProcess) -> None:
    node = hub.join("lossy")
    lost, kept = renewed(node), renewed(node)
    take_up(node, kept)
    node.beat(client=node.connect())
    assert sorted(one.state for one in certificates(hub, node.node_id)) == ["replaced", "valid"]
    take_up(node, lost)
    with pytest.raises(CertificateError, match="not the one this hub issued"):
        node.beat(client=node.connect())


def test_renewing_over_and_over_is_slowed_down(hub: HubProcess) -> None:
    node = hub.join("greedy")
    for _ in range(RENEWALS_AT_ONCE):
        renewed(node)
    with pytest.raises(OverloadedError, match="too often"):
        [renewed(node) for _ in range(3)]
    assert len(certificates(hub, node.node_id)) == 2, "each unused one takes the place of the one before"


def test_a_node_cannot_renew_as_an_operator_nor_for_a_shard(hub: HubProcess) -> None:
    node = hub.join("climber")
    _, csr = new_key_and_csr()
    request = CertificateRequest(csr_pem=csr.decode())
    for path in ("/v1/operator/renew", "/v1/shard/renew"):
        with pytest.raises(RoleError):
            node.client.call("POST", path, request, Ok)
    with pytest.raises(CertificateError, match="signing request"):
        node.client.call("POST", "/v1/node/renew", CertificateRequest(csr_pem="nonsense"), Ok)


def test_a_renewal_that_was_cut_between_two_files_is_finished_at_the_next_start(tmp_path: Path) -> None:
    key, _ = new_key_and_csr()
    (tmp_path / "node.pem").write_bytes(b"old certificate")
    (tmp_path / "node.key").write_bytes(b"old key")
    (tmp_path / PENDING).write_bytes(b"-----BEGIN CERTIFICATE-----\nnew\n-----END CERTIFICATE-----\n" + key)
    assert finish_renewal(tmp_path)
    assert (tmp_path / "node.key").read_bytes() == key
    assert b"new" in (tmp_path / "node.pem").read_bytes()
    assert not finish_renewal(tmp_path)


def test_an_agent_renews_when_the_hub_wants_it_and_its_node_goes_on(hub: HubProcess, tmp_path: Path) -> None:
    import os

    environment = {**os.environ, "CIUIC_TOKEN": hub.token(), "CIUIC_HOME": str(tmp_path / "node-home")}
    command = [sys.executable, "-m", "ciuic.cli.main", "node", "join", hub.url, "--location", "agent"]
    with (tmp_path / "agent.log").open("w") as log:
        agent = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
    try:
        folder = tmp_path / "node-home" / "nodes" / "agent"
        eventually(lambda: hub.nodes().get("agent"), within_s=60)
        eventually(lambda: hub.nodes()["agent"].state == "idle" and (folder / "node.pem").exists(), within_s=60)
        before = certificate_serial((folder / "node.pem").read_bytes())
        reply = hub.operator().call("POST", "/v1/hub/rotate", RotateRequest(clients=True), RotateReply)
        assert reply.told >= 1

        def states() -> dict[str, str]:
            return {one.serial: one.state for one in certificates(hub, "agent")}

        eventually(lambda: states().get(before) == "replaced", within_s=60)
        assert list(states().values()).count("valid") == 1
        seen = len(hub.events())
        assert certificate_serial((folder / "node.pem").read_bytes()) != before
        eventually(lambda: hub.nodes()["agent"].last_seen_s is not None and hub.nodes()["agent"].last_seen_s < 5)
        assert hub.nodes()["agent"].state == "idle"
        assert "node.dead" not in [event.kind for event in hub.events()[seen:]]
    finally:
        agent.terminate()
        assert agent.wait(timeout=60) == 0, (tmp_path / "agent.log").read_text()


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_a_revoked_token_lets_nobody_in(hub: HubProcess) -> None:
    token = hub.token(uses=5)
    hub.join("first", token=token)
    token_id = parse_token(token).id
    (info,) = [
        one for one in hub.operator().call("GET", "/v1/tokens", None, list[TokenInfo]) if one.token_id == token_id
    ]
    assert (info.role, info.uses_left) == ("node", 4)
    hub.operator().call("POST", f"/v1/tokens/{token_id}/revoke", None, Ok)
    with pytest.raises(TokenError, match="used up"):
        hub.join("second", token=token)
    with pytest.raises(NotFoundError, match="no open token"):
        hub.operator().call("POST", f"/v1/tokens/{token_id}/revoke", None, Ok)
    assert hub.nodes()["first"].state != "evicted"


# ---- revocation ----------------------------------------------------------------------------------------------------


def test_a_revoked_node_is_refused_on_its_open_connection_and_then_cut(hub: HubProcess) -> None:
    node = hub.join("revoked")
    node.beat()
    with dial(hub, node) as stream:
        assert ask(stream, "GET", "/v1/node/probe?bytes=1")[0] == 200
        assert revoke(hub, node.node_id).role == "node"
        status, body = ask(stream, "GET", "/v1/node/probe?bytes=1")
        assert status == 401
        assert b"evicted" in body
        assert until_closed(stream, within_s=20.0) < 20.0
    with pytest.raises(CertificateError):
        node.beat(client=node.connect())
    assert hub.nodes()[node.node_id].state == "evicted"
    with pytest.raises(NotFoundError, match="nobody named"):
        revoke(hub, node.node_id)


def test_a_revoked_viewer_sees_no_more_of_a_stream_that_it_follows(hub: HubProcess) -> None:
    viewer = hub.join("watcher", role="viewer")
    seen: list[bytes] = []
    ended = threading.Event()

    def follow() -> None:
        with suppress(UnreachableError, CertificateError):
            seen.extend(viewer.client.stream_lines("/v1/events?follow=1"))
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    eventually(lambda: seen)
    revoke(hub, viewer.node_id)
    assert ended.wait(20.0), "the stream goes on"
    count = len(seen)
    hub.join("unseen")
    assert not [line for line in seen[count:] if b"unseen" in line]
    with pytest.raises(CertificateError, match="revoked"):
        viewer.connect().call("GET", "/v1/hub", None, HubInfo)


def test_revocation_survives_kill_9(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as own:
        viewer = own.join("eve", role="viewer")
        assert viewer.client.call("GET", "/v1/hub", None, HubInfo).boot_id
        revoke(own, "eve")
        own.kill()
        own.start()
        with pytest.raises(CertificateError, match="revoked"):
            viewer.connect().call("GET", "/v1/hub", None, HubInfo)


def test_an_operator_that_revoked_itself_is_let_in_again_by_who_starts_the_hub(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "home") as own:
        (me,) = [
            one
            for one in own.operator().call("GET", "/v1/certificates", None, list[CertificateInfo])
            if one.role == "operator"
        ]
        revoke(own, me.name)
        with pytest.raises(CertificateError, match="revoked"):
            own.operator().call("GET", "/v1/hub", None, HubInfo)
        own.terminate()
        own.start()
        assert own.operator().call("GET", "/v1/hub", None, HubInfo).boot_id


def test_a_name_of_a_node_and_of_an_operator_is_not_guessed(hub: HubProcess) -> None:
    hub.join("twice")
    hub.join("twice", role="viewer")
    with pytest.raises(ConflictError, match="of a node and of a viewer"):
        revoke(hub, "twice")
    assert revoke(hub, "twice", "viewer").role == "viewer"
    assert hub.nodes()["twice"].state != "evicted"


def test_a_certificate_for_a_viewer_looks_and_changes_nothing(hub: HubProcess, tmp_path: Path) -> None:
    hub.join("seen")
    key, csr = new_key_and_csr()
    request = OperatorRequest(name="Carol X", role="viewer", csr_pem=csr.decode())
    made = hub.operator().call("POST", "/v1/operators", request, OperatorReply)
    assert made.name == "carol-x"
    (tmp_path / "c.pem").write_text(made.certificate_pem)
    (tmp_path / "c.key").write_bytes(key)
    authority = (hub.home / "operator" / "authority.pem").read_bytes()
    client = HubClient(hub.url, authority, tmp_path / "c.pem", tmp_path / "c.key")
    assert client.call("GET", "/v1/nodes", None, list[NodeInfo])
    for method, path in (("POST", "/v1/operators"), ("GET", "/v1/audit"), ("GET", "/v1/certificates")):
        with pytest.raises(RoleError):
            client.call(method, path, request if method == "POST" else None, Ok)
    client.close()


# ---- the hub's own -------------------------------------------------------------------------------------------------


def test_hub_certificate_rotated_while_nodes_work(hub: HubProcess) -> None:
    node = hub.join("steady")
    node.beat()
    before = served_serial(hub)
    boot = node.beat().boot_id
    reply = hub.operator().call("POST", "/v1/hub/rotate", RotateRequest(), RotateReply)
    assert reply.ends_at > time.time() + 300 * 86400
    after = served_serial(hub)
    assert after == reply.serial != before
    assert node.beat().boot_id == boot, "an open connection goes on"
    assert node.beat(client=node.connect()).boot_id == boot, "and a new one is believed: the authority is the same"


def test_a_hub_certificate_of_another_authority_is_not_believed(hub: HubProcess, tmp_path: Path) -> None:
    from ciuic.net.tls import Authority

    node = hub.join("careful")
    other = Authority.create(tmp_path / "other")
    cert, key = node.folder / "node.pem", node.folder / "node.key"
    client = HubClient(hub.url, other.certificate_pem, cert, key, "control")
    with pytest.raises(CertificateError, match="no certificate of this network's authority"):
        node.beat(client=client)
    client.close()


# ---- shards --------------------------------------------------------------------------------------------------------


def test_a_shard_renews_while_it_serves_and_a_revoked_one_is_refused(tmp_path: Path) -> None:
    with ShardCluster(tmp_path) as cluster:
        (shard,) = cluster.add_shards("s1")
        home, operator = cluster.home / "operator", cluster.operator
        before = shown(shard.port, home)
        operator.call("POST", "/v1/hub/rotate", RotateRequest(clients=True), RotateReply)
        eventually(lambda: shown(shard.port, home) != before, within_s=60)

        def states() -> list[str]:
            found = operator.call("GET", "/v1/certificates", None, list[CertificateInfo])
            return sorted(one.state for one in found if one.name == "s1")

        eventually(lambda: states() == ["replaced", "valid"], within_s=60)
        assert shard.process.is_alive
        own = tmp_path / "shard-s1" / "shards" / "s1"
        client = HubClient(cluster.url, (own / "authority.pem").read_bytes(), own / "shard.pem", own / "shard.pem")
        empty = ShardReport(fragments=[])
        assert client.call("POST", "/v1/shard/report", empty, ShardReply).known == []
        operator.call("POST", "/v1/certificates/revoke", RevokeRequest(name="s1"), RevokeReply)
        with pytest.raises(CertificateError, match="revoked"):
            client.call("POST", "/v1/shard/report", empty, ShardReply)
        client.close()


def shown(port: int, operator: Path) -> str:
    """Serial of the certificate that somebody serves with."""
    context = ssl.create_default_context(cadata=(operator / "authority.pem").read_text())
    plain = socket.create_connection(("127.0.0.1", port), timeout=30)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
        der = stream.getpeercert(binary_form=True)
    assert der is not None
    return certificate_serial(ssl.DER_cert_to_PEM_cert(der).encode())
